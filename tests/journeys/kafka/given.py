"""What the storm's processes are told by their environment, and their OUTBOX setting."""

import json
import os
from datetime import timedelta
from typing import Any

VARIABLE = "KAFKA_STORM"

given: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))

# Rules that a control leaves out. Each must double messages, else the storm would prove nothing.
SEND_THEN_MARK = "send-then-mark"  # an idempotent producer without transactions
MARKER_NOT_ASKED = "marker-not-asked"
NOBODY_FENCED = "nobody-fenced"
CONTROLS = (SEND_THEN_MARK, MARKER_NOT_ASKED, NOBODY_FENCED)


def outbox(servers: list[str], ordered: str, plain: list[str], control: str) -> dict[str, Any]:
    """Return the setting OUTBOX of a storm."""
    options = {"SERVERS": servers, "TRANSACTIONS": control != SEND_THEN_MARK}
    return {
        "BROKERS": {"default": {"BACKEND": "outbox.brokers.kafka.KafkaBroker", "OPTIONS": options}},
        "TOPICS": {ordered: {"TYPE": "fifo"}, **{topic: {} for topic in plain}},
        "RELAY": {"BATCH_SIZE": 50, "LANES": 4, "LEASE": timedelta(seconds=3)},
    }
