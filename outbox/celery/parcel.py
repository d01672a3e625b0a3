"""A stored task on its way to Celery's broker."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from outbox.celery.stored import StoredTask


@dataclass(frozen=True, slots=True)
class Parcel:
    """
    A task with its place in a batch.

    Args:
        number: its place among the messages of a send, from 0.
        message_id: that of its message row.
    """

    number: int
    message_id: str
    task: StoredTask

    def prepare(self, channel: Any, **more: Any) -> Any:
        """Make the transport's message of it, with more properties."""
        task, headers = self.task, self.task.read_headers()
        properties = task.read_properties(expires=headers.get("expires"), now=datetime.now(UTC)) | more
        body: str | bytes = task.payload
        if task.content_encoding != "binary" and "compression" not in headers:
            body = task.payload.decode(task.content_encoding)
        return channel.prepare_message(
            body,
            priority=properties.pop("priority", 0),
            content_type=task.content_type,
            content_encoding=task.content_encoding,
            headers=headers,
            properties=properties,
        )
