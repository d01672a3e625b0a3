"""Check for settings that are for development only: `manage.py check --deploy`."""

from __future__ import annotations

import os
from typing import Any

from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution

from outbox import failpoints
from outbox.checks.settings import known_topics


def check_durability(**kwargs: Any) -> list[CheckMessage]:
    """
    E032: Topics use a broker that is for tests.

    Its messages are in the memory of one process, and are lost when it ends. Set another BACKEND. (With `--deploy`.)
    """
    return [
        Error(
            f"Broker {alias!r} keeps its messages in the memory of one process.",
            hint="Set a BACKEND that stores messages, or remove BACKEND: the default one does.",
            id="outbox.E032",
        )
        for alias in sorted({topic.broker for _, topic, broker in known_topics() if not broker.is_durable})
    ]


def check_failpoints(**kwargs: Any) -> list[CheckMessage]:
    """
    W033: Failpoints are set.

    They end processes on purpose, for tests. Remove the environment variable. (With `--deploy`.)
    """
    if not os.environ.get(failpoints.VARIABLE):
        return []
    text = f"{failpoints.VARIABLE} is set: processes end themselves at these failpoints."
    return [Caution(text, hint="Remove the environment variable.", id="outbox.W033")]
