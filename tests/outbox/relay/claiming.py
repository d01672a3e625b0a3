"""Helpers for tests of claims, and of what was sent of them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from outbox import database
from outbox.brokers.memory import MemoryBroker
from outbox.models import MessageRow, Ticket, Topic
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


def ids(tickets: Iterable[Ticket]) -> list[str]:
    return [str(ticket.message_id) for ticket in tickets]


def shown(broker: MemoryBroker, topic: Topic) -> list[str]:
    """Return the ids of the messages that the broker shows in a topic, in their order."""
    return [message.message_id for message in broker.visible(topic.name)]
