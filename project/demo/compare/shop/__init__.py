"""The shop of the comparison. It sends its messages in one of three ways, which the environment variable `DEMO_WAY` names."""

import os

DELAY, ON_COMMIT, OUTBOX = "delay", "on_commit", "outbox"


def way() -> str:
    return os.environ["DEMO_WAY"]
