"""What a soak's processes are told by their environment, and their OUTBOX setting."""

import json
import os
from datetime import date, timedelta
from typing import Any, NamedTuple

VARIABLE = "OUTBOX_SOAK"

given: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))

# A message is kept for its retention, the rest of its day and until the next maintenance: less than four minutes. It has to be
# longer than what a killed consumer held is away, else the inbox forgets a message before it is delivered again.
DAY = timedelta(minutes=1)  # what the outbox takes for a day
FIRST_DAY = date(2000, 1, 1)  # what it takes the first one for
RETENTION = timedelta(minutes=2)
MAINTENANCE_INTERVAL = 10.0  # seconds


class Names(NamedTuple):
    """The topics of a soak and their group."""

    work: str  # of type transaction where the broker has half messages
    steps: str  # fifo
    later: str  # of type delay where the broker has it
    group: str


def names(unique: str) -> Names:
    return Names(*(f"{name}-{unique}" for name in Names._fields))


def outbox(soak: dict[str, Any]) -> dict[str, Any]:
    """Return the setting OUTBOX of a soak: backend, options, types of the topics, and the names' suffix."""
    all_ = names(soak["unique"])
    more = {"RETENTION": RETENTION} if soak["backend"].endswith("EmbeddedBroker") else {}
    return {
        "BROKERS": {"default": {"BACKEND": soak["backend"], "OPTIONS": soak["options"]}},
        "TOPICS": {
            all_.work: {"TYPE": soak["work"], **more},
            all_.steps: {"TYPE": "fifo", **more},
            all_.later: {"TYPE": soak["later"], **more},
        },
        "CONSUMER": {"INVISIBLE": timedelta(seconds=10), "SETTLE": timedelta(seconds=30)},
        "RELAY": {"SWEEP_AGE": timedelta(seconds=5)},
        "RETENTION": RETENTION,
        "IDEMPOTENCY_RETENTION": RETENTION,
        "CELERY_WAKEUP": False,
    }
