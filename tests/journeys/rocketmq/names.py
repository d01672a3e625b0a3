"""What a journey's processes are told by their environment, and what comes of it."""

import json
import os
from datetime import timedelta
from typing import Any

VARIABLE = "ROCKETMQ_JOURNEY"

given = json.loads(os.environ.get(VARIABLE, "{}"))


def names(unique: str) -> tuple[str, str, str]:
    """Return a journey's plain topic, its ordered topic and its consumer group."""
    return f"work-{unique}", f"steps-{unique}", f"journey-{unique}"


def outbox(unique: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the setting OUTBOX of a journey. Times are short: what a killed process held comes back soon."""
    work, steps, _ = names(unique)
    options = {**options, "CHECK_HORIZON": timedelta(seconds=20)}
    return {
        "BROKERS": {"default": {"BACKEND": "outbox.brokers.rocketmq.RocketMQBroker", "OPTIONS": options}},
        "TOPICS": {work: {"TYPE": "transaction"}, steps: {"TYPE": "fifo"}},
        "CONSUMER": {"INVISIBLE": timedelta(seconds=3)},
        "RELAY": {"SWEEP_AGE": timedelta(seconds=5), "BATCH_SIZE": 50},
        "CELERY_WAKEUP": True,
    }
