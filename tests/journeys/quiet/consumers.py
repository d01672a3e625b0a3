"""A handler that always fails."""

from __future__ import annotations

from typing import Any

from outbox import Message, RetryPolicy, consumer


class Quiet(Message):
    number: int

    class Meta:
        topic = "quiet"
        key = "number"


@consumer(Quiet, group="quiet", retry=RetryPolicy(limit=100))
def fail(message: Quiet, context: Any) -> None:
    raise ValueError(f"order {message.number} has no customer")
