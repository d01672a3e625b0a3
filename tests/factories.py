"""
Rows of the outbox, as tests need them. A factory fills in what the test is not about.

They go in over Django's connection: inside a test's transaction, or committed where the test is `transaction=True`.
"""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import factory
from django.db import connections

from outbox import models
from outbox.models import State


def message_id(at: datetime | None = None) -> UUID:
    """Make a uuid7 of that time, by default of now."""
    milliseconds = int(at.timestamp() * 1000) if at else time.time_ns() // 1_000_000
    number = milliseconds << 80 | 7 << 76 | secrets.randbits(12) << 64 | 0b10 << 62 | secrets.randbits(62)
    return UUID(int=number)


def stored(row: Any) -> Any:
    """Read a row (or a batch in the relay's memory) again, as the database holds it now."""
    model = type(row) if hasattr(row, "_meta") else models.Batch
    return model.objects.get(pk=getattr(row, "pk", None) or row.id)


class IdentityFactory(factory.django.DjangoModelFactory):
    """Insert a row whose primary key the database draws (GENERATED ALWAYS, which no ORM insert passes)."""

    class Meta:
        abstract = True

    @classmethod
    def _create(cls, model_class: Any, *args: Any, **fields: Any) -> Any:
        columns = [model_class._meta.get_field(name).column for name in fields]
        places = ", ".join(["%s"] * len(columns))
        key = model_class._meta.pk.column
        with connections[cls._meta.database].cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {model_class._meta.db_table} ({', '.join(columns)}) VALUES ({places}) RETURNING {key}",
                list(fields.values()),
            )
            return model_class.objects.using(cls._meta.database).get(pk=cursor.fetchone()[0])


class TopicFactory(IdentityFactory):
    class Meta:
        model = models.Topic

    name = factory.Sequence(lambda n: f"topic-{n}")
    broker = "default"
    type = "normal"
    ordered = factory.LazyAttribute(lambda topic: topic.type == "fifo")
    paused = False


class MessageRowFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = models.MessageRow

    class Params:
        topic = factory.SubFactory(TopicFactory)

    id = factory.LazyFunction(message_id)
    topic_id = factory.LazyAttribute(lambda message: message.topic.id)
    body = b'{"order_id": 1}'
    created_at = factory.LazyFunction(lambda: datetime.now(UTC))


class TicketFactory(IdentityFactory):
    """A message that waits: `TicketFactory(topic=topic)`, or `message=` for a message row of the test's own."""

    class Meta:
        model = models.Ticket

    class Params:
        topic = factory.SubFactory(TopicFactory)
        message = factory.SubFactory(MessageRowFactory, topic=factory.SelfAttribute("..topic"))

    message_id = factory.LazyAttribute(lambda ticket: ticket.message.id)
    topic_id = factory.LazyAttribute(lambda ticket: ticket.topic.id)
    order_key = None


class DelayedFactory(factory.django.DjangoModelFactory):
    class Meta:
        model = models.Delayed

    class Params:
        topic = factory.SubFactory(TopicFactory)
        message = factory.SubFactory(MessageRowFactory, topic=factory.SelfAttribute("..topic"))

    message_id = factory.LazyAttribute(lambda delayed: delayed.message.id)
    topic_id = factory.LazyAttribute(lambda delayed: delayed.topic.id)
    due_at = factory.LazyFunction(lambda: datetime.now(UTC))
    order_key = None


class BatchFactory(IdentityFactory):
    """
    A batch of `size` messages with their rows, CLAIMED with a living lease unless told otherwise.

    Without `owner` it counts as ownerless: any relay may claim it again at once. Give a lane whose lock is held where
    the lease shall count.
    """

    class Meta:
        model = models.Batch

    class Params:
        topic = factory.SubFactory(TopicFactory)
        size = 1

    topic_id = factory.LazyAttribute(lambda batch: batch.topic.id)
    message_ids = factory.LazyAttribute(
        lambda batch: [message.id for message in MessageRowFactory.create_batch(batch.size, topic=batch.topic)]
    )
    lane = 1
    first_seq = 1
    state = State.CLAIMED
    attempt = 1
    tries = 0
    lease_until = factory.LazyAttribute(
        lambda batch: datetime.now(UTC) + timedelta(seconds=30) if batch.state == State.CLAIMED else None
    )
    due_at = factory.LazyAttribute(lambda batch: datetime.now(UTC) if batch.state == State.RELEASED else None)
    decided_at = factory.LazyAttribute(lambda batch: datetime.now(UTC) if batch.state == State.PREPARED else None)
    sent_at = factory.LazyAttribute(lambda batch: datetime.now(UTC) if batch.state == State.SENT else None)
