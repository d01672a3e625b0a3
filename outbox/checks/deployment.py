"""What is good on one's own machine only: `manage.py check --deploy`."""

from __future__ import annotations

import os
from typing import Any

from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution

from outbox import failpoints
from outbox.checks.settings import known_topics


def check_durability(**kwargs: Any) -> list[CheckMessage]:
    """
    E032: Topics are carried by a broker that is for tests.

    What it holds is seen by one process, and gone with it. Name another BACKEND. (With `--deploy`.)
    """
    return [
        Error(
            f"Broker {alias!r} keeps its messages in the memory of one process.",
            hint="Name the BACKEND of a broker that keeps its messages, or leave BACKEND out: the default one does.",
            id="outbox.E032",
        )
        for alias in sorted({topic.broker for _, topic, broker in known_topics() if not broker.is_durable})
    ]


def check_failpoints(**kwargs: Any) -> list[CheckMessage]:
    """
    W033: Failpoints are set.

    They end processes on purpose, for tests. Take the variable out of the environment. (With `--deploy`.)
    """
    if not os.environ.get(failpoints.VARIABLE):
        return []
    text = f"{failpoints.VARIABLE} is set: processes end themselves where it says so."
    return [Caution(text, hint="Take the variable out of the environment.", id="outbox.W033")]
