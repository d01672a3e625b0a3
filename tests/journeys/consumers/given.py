"""What the storm's processes are told by their environment, and their OUTBOX setting."""

import json
import os
from datetime import timedelta
from typing import Any

VARIABLE = "CONSUMER_STORM"

given: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))

INVISIBLE = timedelta(seconds=given.get("invisible", 2))


def outbox(storm: dict[str, Any]) -> dict[str, Any]:
    """Return OUTBOX for a storm: backend, options and the names of its topics."""
    work, steps, _ = names(storm)
    return {
        "BROKERS": {"default": {"BACKEND": storm["backend"], "OPTIONS": storm["options"]}},
        "TOPICS": {work: {"TYPE": "normal"}, steps: {"TYPE": "fifo"}},
        "CONSUMER": {"INVISIBLE": INVISIBLE, "BATCH_SIZE": 8},
        "CELERY_WAKEUP": False,
    }


def names(storm: dict[str, Any]) -> tuple[str, str, str]:
    """Return the plain topic, the ordered one and the group."""
    unique = storm.get("unique", "nowhere")
    return f"storm-{unique}", f"storm-steps-{unique}", f"storm-{unique}"
