"""Helpers for tests of claims."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from outbox import database
from outbox.models import MessageRow, Topic
from outbox.relay.claims import Claims
from tests.factories import MessageRowFactory

LEASE = timedelta(seconds=30)


def claims(connection: database.Connection | None = None, lane: int = 1, **options: Any) -> Claims:
    """Return the claims of a relay for the broker "default"."""
    return Claims(connection or database.raw("default"), "default", lane, LEASE, options.pop("batch_size", 500), **options)


@contextmanager
def late_ticket(connection: database.Connection, topic: Topic) -> Iterator[MessageRow]:
    """Yield a message whose ticket is written before the block begins, and committed after it ends."""
    with connection.transaction():
        message = MessageRowFactory(topic=topic)
        connection.execute("INSERT INTO outbox_ticket (message_id, topic_id) VALUES (%s, %s)", [message.id, topic.id])
        yield message
