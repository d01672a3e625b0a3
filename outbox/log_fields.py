"""What log records say beside their text, so that logs as JSON can be searched: `extra=log_fields(topic=..., message_id=...)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

PREFIX = "outbox_"  # no attribute of a LogRecord begins so


class HasTopic(Protocol):
    """A message, or a half message, whatever else is known of it."""

    @property
    def topic(self) -> str: ...
    @property
    def message_id(self) -> object: ...


def fields_of(message: HasTopic) -> dict[str, Any]:
    """Return the fields of a log record about one message."""
    return log_fields(message_id=message.message_id, topic=message.topic)


def log_fields(
    *,
    message_id: object = None,
    message_ids: Iterable[object] | None = None,
    topic: str | None = None,
    topics: Iterable[str] | None = None,
    batch: int | None = None,
    batches: Iterable[int] | None = None,
    attempt: int | None = None,
    group: str | None = None,
    broker: str | None = None,
    database: str | None = None,
    lane: int | None = None,
) -> dict[str, Any]:
    """
    Return the fields of a log record by their names there: `outbox_topic`, `outbox_message_id`, … What is None is left out.

    Args:
        message_id, message_ids: as text in the record, whatever they are here.
        message_ids, topics, batches: lists, where a record speaks of several.
        attempt: of the batch, or of the delivery.
    """
    found = {
        "message_id": None if message_id is None else str(message_id),
        "message_ids": None if message_ids is None else [str(one) for one in message_ids],
        "topic": topic,
        "topics": None if topics is None else sorted(set(topics)),
        "batch": batch,
        "batches": None if batches is None else sorted(set(batches)),
        "attempt": attempt,
        "group": group,
        "broker": broker,
        "database": database,
        "lane": lane,
    }
    return {f"{PREFIX}{name}": value for name, value in found.items() if value is not None}
