"""A shop whose processes are frozen: what they hold is free again after a second. Consumers are defined here, too."""

from datetime import timedelta

from tests.process_settings import *  # noqa: F403
from tests.process_settings import DATABASES, OUTBOX

DATABASES = {"default": DATABASES["default"]}

SECOND = timedelta(seconds=1)
TOPICS = {"letters": "normal", "pairs": "transaction", "parcels": "fifo", "alarms": "delay"}
GROUP = "frozen"

OUTBOX = {
    **OUTBOX,
    "BROKERS": {"default": {"BACKEND": "outbox.embedded.EmbeddedBroker", "OPTIONS": {"CHECK_AFTER": timedelta(0)}}},
    "TOPICS": {name: {"TYPE": kind} for name, kind in TOPICS.items()},
    "RELAY": {"LEASE": SECOND, "SWEEP_AGE": SECOND},
    "CONSUMER": {"INVISIBLE": SECOND, "WAIT": timedelta(milliseconds=100)},
    "CHECK_BACK": {"LOCK_TIMEOUT": timedelta(milliseconds=200)},
    "CELERY_WAKEUP": False,
}
