"""The shop that sends its messages in one of three ways, which `DEMO_WAY` in its environment names."""

import os

DELAY, ON_COMMIT, OUTBOX = "delay", "on_commit", "outbox"


def way() -> str:
    return os.environ["DEMO_WAY"]
