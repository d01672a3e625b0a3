"""
Rows of the outbox for tests, made by factory_boy. A factory fills in what the test is not about::

    BatchFactory(topic__name="orders", size=3, sent=True)
    TicketFactory(of=OrderPlaced(order_id=1))

They go in over Django's connection: inside the test's transaction, or committed where the test has none. A topic of a name
that is there is taken, else made.
"""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import factory
from django.db import connections

from outbox import models
from outbox.models import State
from outbox.publishing.draft import compose


def message_id(at: datetime | None = None) -> UUID:
    """Make a uuid7 of that time, by default of now."""
    milliseconds = int(at.timestamp() * 1000) if at else time.time_ns() // 1_000_000
    number = milliseconds << 80 | 7 << 76 | secrets.randbits(12) << 64 | 0b10 << 62 | secrets.randbits(62)
    return UUID(int=number)


def _now() -> datetime:
    return datetime.now(UTC)


def _now_if(*states: State) -> Any:
    """Return a declaration: now where the batch is in one of these states, else NULL."""
    return factory.LazyAttribute(lambda batch: _now() if batch.state in states else None)


def _of_message(name: str, otherwise: Any) -> Any:
    """Return a declaration: what publishing `of` writes into that column, or a value where there is no `of`."""
    return factory.LazyAttribute(lambda row: getattr(compose(row.of), name) if row.of is not None else otherwise)


class IdentityFactory(factory.django.DjangoModelFactory):
    """Insert a row whose primary key the database draws (GENERATED ALWAYS, which no ORM insert passes)."""

    class Meta:
        abstract = True

    @classmethod
    def _database(cls) -> str:
        return str(cls._meta.database)  # type: ignore[attr-defined]

    @classmethod
    def _create(cls, model_class: Any, *args: Any, **fields: Any) -> Any:
        columns = [model_class._meta.get_field(name).column for name in fields]
        places = ", ".join(["%s"] * len(columns))
        key = model_class._meta.pk.column
        with connections[cls._database()].cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {model_class._meta.db_table} ({', '.join(columns)}) VALUES ({places}) RETURNING {key}",  # noqa: S608
                list(fields.values()),
            )
            return model_class.objects.using(cls._database()).get(pk=cursor.fetchone()[0])


class TopicFactory(IdentityFactory):
    """A topic's row. Settings are not asked; a relay or consumer that shall use it needs it there, too."""

    class Meta:
        model = models.Topic

    class Params:
        of = None

    name = factory.LazyAttributeSequence(lambda topic, n: topic.of._meta.topic if topic.of is not None else f"topic-{n}")
    broker = "default"
    type = "normal"
    ordered = factory.LazyAttribute(lambda topic: topic.type == "fifo")
    paused = False

    @classmethod
    def _create(cls, model_class: Any, *args: Any, **fields: Any) -> Any:
        known = model_class.objects.using(cls._database()).filter(name=fields["name"]).first()
        return known or super()._create(model_class, *args, **fields)


class MessageRowFactory(factory.django.DjangoModelFactory):
    """
    A message row without a ticket: nothing sends it. `of`: the message that it holds, written as `publish()` writes it.
    """

    class Meta:
        model = models.MessageRow

    class Params:
        of = None
        topic = factory.SubFactory(TopicFactory, of=factory.SelfAttribute("..of"))

    id = factory.LazyFunction(message_id)
    topic_id = factory.LazyAttribute(lambda message: message.topic.id)
    key = _of_message("key", "")
    headers = _of_message("headers", "{}")
    body = _of_message("body", b'{"order_id": 1}')
    created_at = factory.LazyFunction(_now)


class TicketFactory(IdentityFactory):
    """A message that waits: `TicketFactory(of=OrderPlaced(order_id=1))`, or `message=` for a row of the test's own."""

    class Meta:
        model = models.Ticket

    class Params:
        of = None
        topic = factory.SubFactory(TopicFactory, of=factory.SelfAttribute("..of"))
        message = factory.SubFactory(MessageRowFactory, of=factory.SelfAttribute("..of"), topic=factory.SelfAttribute("..topic"))

    message_id = factory.LazyAttribute(lambda ticket: ticket.message.id)
    topic_id = factory.LazyAttribute(lambda ticket: ticket.message.topic_id)
    order_key = None


class DelayedFactory(factory.django.DjangoModelFactory):
    """A message that waits for its time, `due_at`."""

    class Meta:
        model = models.Delayed

    class Params:
        of = None
        topic = factory.SubFactory(TopicFactory, of=factory.SelfAttribute("..of"))
        message = factory.SubFactory(MessageRowFactory, of=factory.SelfAttribute("..of"), topic=factory.SelfAttribute("..topic"))

    message_id = factory.LazyAttribute(lambda delayed: delayed.message.id)
    topic_id = factory.LazyAttribute(lambda delayed: delayed.message.topic_id)
    due_at = factory.LazyFunction(_now)
    order_key = None


class BatchFactory(IdentityFactory):
    """
    A batch of `size` messages with their rows, CLAIMED with a living lease unless told otherwise.

    One trait for each state: `BatchFactory(prepared=True)`; also released, sent, dead, skipped. Without `owner` it counts
    as ownerless: any relay may claim it again at once. Give a lane whose lock is held where the lease shall count.
    """

    class Meta:
        model = models.Batch

    class Params:
        topic = factory.SubFactory(TopicFactory)
        size = 1
        released = factory.Trait(state=State.RELEASED, lease_until=None)
        prepared = factory.Trait(
            state=State.PREPARED,
            half_ids=factory.LazyAttribute(lambda batch: [f"half-{position}" for position in range(1, batch.size + 1)]),
        )
        sent = factory.Trait(state=State.SENT)
        dead = factory.Trait(state=State.DEAD, tries=1, last_error="refused by its broker")
        skipped = factory.Trait(state=State.SKIPPED, last_error="refused by its broker")

    topic_id = factory.LazyAttribute(lambda batch: batch.topic.id)
    message_ids = factory.LazyAttribute(
        lambda batch: [message.id for message in MessageRowFactory.create_batch(batch.size, topic=batch.topic)]
    )
    lane = 1
    first_seq = 1
    state = State.CLAIMED
    attempt = 1
    tries = 0
    lease_until = factory.LazyAttribute(lambda batch: _now() + timedelta(seconds=30) if batch.state == State.CLAIMED else None)
    due_at = _now_if(State.RELEASED)
    decided_at = _now_if(State.PREPARED)
    sent_at = _now_if(State.SENT)


class DeadMessageFactory(factory.django.DjangoModelFactory):
    """The copy that is kept of a message the relay gave up, with the dead batch that holds it."""

    class Meta:
        model = models.DeadMessage

    class Params:
        batch = factory.SubFactory(BatchFactory, dead=True)

    message_id = factory.LazyAttribute(lambda dead: dead.batch.message_ids[0])
    batch_id = factory.LazyAttribute(lambda dead: dead.batch.id)
    topic = factory.LazyAttribute(lambda dead: models.Topic.objects.get(pk=dead.batch.topic_id).name)
    body = b'{"order_id": 1}'
    lane = factory.LazyAttribute(lambda dead: dead.batch.lane)
    number = factory.LazyAttribute(lambda dead: dead.batch.first_seq)
    reason = "refused by its broker"


class InboxFactory(factory.django.DjangoModelFactory):
    """A message that a group has handled; a second delivery of it is dropped."""

    class Meta:
        model = models.Inbox

    consumer_group = "points"
    message_id = factory.LazyFunction(message_id)
    dedupe_key = factory.LazyAttribute(lambda inbox: str(inbox.message_id))
    topic = "orders"


class FailedDeliveryFactory(factory.django.DjangoModelFactory):
    """A try of a handler that failed; with `dead_letter=True` the last one, after which the group gave the message up."""

    class Meta:
        model = models.FailedDelivery

    class Params:
        dead_letter = factory.Trait(outcome="dead letter")

    consumer_group = "points"
    message_id = factory.LazyFunction(message_id)
    topic = "orders"
    nth = 1
    outcome = "retry"
    error = "ValueError: no such customer"
    fingerprint = "ValueError in shop.consumers.add_points: no such customer"


class CheckBackFactory(factory.django.DjangoModelFactory):
    """A question of a broker about a half message, and what it was told."""

    class Meta:
        model = models.CheckBack

    request_id = factory.LazyFunction(lambda: str(uuid4()))
    asked_by = "broker"
    topic = "orders"
    message_id = factory.LazyFunction(lambda: str(message_id()))
    half_id = factory.Sequence(lambda n: f"half-{n}")
    answer = "COMMIT"
    reason = "Batch 1 was decided with this half message."
    milliseconds = 1.0


__all__ = [
    "BatchFactory",
    "CheckBackFactory",
    "DeadMessageFactory",
    "DelayedFactory",
    "FailedDeliveryFactory",
    "IdentityFactory",
    "InboxFactory",
    "MessageRowFactory",
    "TicketFactory",
    "TopicFactory",
    "message_id",
]
