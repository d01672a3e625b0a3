"""What the storm's processes are told by their environment, and their OUTBOX setting."""

import json
import os
from datetime import timedelta
from typing import Any, NamedTuple

VARIABLE = "RABBITMQ_STORM"

given: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))

SETTLE = timedelta(seconds=5)
DELAY = timedelta(seconds=2)  # between runs with a message that fails for ever
LIMIT = 3  # retries of it


class Names(NamedTuple):
    """The topics of a storm and their groups."""

    work: str  # normal, of both groups
    bulk: str  # normal, handled by the batch
    steps: str  # fifo
    later: str  # normal, with delays
    spare: str  # normal; the operator purges its queue
    one: str
    two: str
    third: str  # of spare alone

    @property
    def groups(self) -> dict[str, list[str]]:
        return {
            self.work: [self.one, self.two],
            self.bulk: [self.two],
            self.steps: [self.one],
            self.later: [self.one],
            self.spare: [self.third],
        }


def names(unique: str) -> Names:
    return Names(*(f"{name}-{unique}" for name in Names._fields))


def options(nodes: list[str], unique: str) -> dict[str, Any]:
    """Return OPTIONS whose times are short: a frozen node or process is noticed soon."""
    return {"NODES": nodes, "GROUPS": names(unique).groups, "HEARTBEAT": "PT4S", "REQUEST_TIMEOUT": "PT3S"}


def outbox(unique: str, nodes: list[str]) -> dict[str, Any]:
    """Return the setting OUTBOX of a storm."""
    all_ = names(unique)
    backend = "outbox.brokers.rabbitmq.RabbitMQBroker"
    return {
        "BROKERS": {"default": {"BACKEND": backend, "OPTIONS": options(nodes, unique)}},
        "TOPICS": {
            all_.work: {"TYPE": "normal"},
            all_.bulk: {"TYPE": "normal"},
            all_.steps: {"TYPE": "fifo"},
            all_.later: {"TYPE": "normal"},
            all_.spare: {"TYPE": "normal"},
        },
        "CONSUMER": {"INVISIBLE": timedelta(seconds=4), "SETTLE": SETTLE, "TASK_TIME": timedelta(seconds=5)},
        "RELAY": {"BATCH_SIZE": 50, "TASK_TIME": timedelta(seconds=5)},
        "CELERY_WAKEUP": True,
    }
