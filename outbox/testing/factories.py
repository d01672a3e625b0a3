"""
Factories for rows of the outbox, with factory_boy. A factory fills in the fields that a test does not set::

    BatchFactory(topic__name="orders", size=3, sent=True)
    TicketFactory(of=OrderPlaced(order_id=1))

Rows are inserted over Django's connection: inside the test's transaction, or committed if the test has none. A topic is created
unless one with its name exists.
"""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import factory

from outbox import models
from outbox.consuming.deferred import HELD
from outbox.ids import made_at, topic_number
from outbox.message import Header, read_headers
from outbox.models import State
from outbox.publishing.draft import compose


def message_id(at: datetime | None = None) -> UUID:
    """Return a new uuid7 that contains a time, by default the current time."""
    milliseconds = int(at.timestamp() * 1000) if at else time.time_ns() // 1_000_000
    number = milliseconds << 80 | 7 << 76 | secrets.randbits(12) << 64 | 0b10 << 62 | secrets.randbits(62)
    return UUID(int=number)


def _now() -> datetime:
    return datetime.now(UTC)


def _now_if(*states: State) -> Any:
    """Return a declaration of a field: the current time if the batch is in one of these states, otherwise NULL."""
    return factory.LazyAttribute(lambda batch: _now() if batch.state in states else None)


def _of_message(name: str, otherwise: Any) -> Any:
    """Return a declaration of a field: the value that publishing `of` writes into that column, or `otherwise` without `of`."""
    return factory.LazyAttribute(lambda row: getattr(compose(row.of), name) if row.of is not None else otherwise)


class IdentityFactory(factory.django.DjangoModelFactory):
    """Inserts a row with the given columns only, so that the others have the database's defaults."""

    class Meta:
        abstract = True

    @classmethod
    def _database(cls) -> str:
        return str(cls._meta.database)  # type: ignore[attr-defined]

    @classmethod
    def _create(cls, model_class: Any, *args: Any, **fields: Any) -> Any:
        columns = [model_class._meta.get_field(name).column for name in fields]
        values = ", ".join(["%s"] * len(columns))
        insert = f"INSERT INTO {model_class._meta.db_table} ({', '.join(columns)}) VALUES ({values}) RETURNING *"  # noqa: S608
        return model_class.objects.using(cls._database()).raw(insert, list(fields.values()))[0]


class TopicFactory(IdentityFactory):
    """A topic's row. A relay or consumer needs the topic in settings, too."""

    class Meta:
        model = models.Topic

    class Params:
        of = None

    id = factory.LazyAttribute(lambda topic: topic_number(topic.name))
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
    A message row without a ticket, so it is not sent. With `of=message`, key, headers and body are those of `publish(message)`.
    """

    class Meta:
        model = models.MessageRow

    class Params:
        of = None
        topic = factory.SubFactory(TopicFactory, of=factory.SelfAttribute("..of"))

    id = factory.LazyFunction(message_id)
    created_at = factory.LazyAttribute(lambda message: made_at(message.id))
    topic_id = factory.LazyAttribute(lambda message: message.topic.id)
    key = _of_message("key", "")
    headers = _of_message("headers", "{}")
    body = _of_message("body", b'{"order_id": 1}')


class TicketFactory(IdentityFactory):
    """A message that waits to be sent: `TicketFactory(of=OrderPlaced(order_id=1))`, or `message=` for an existing row."""

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
    """A delayed message, due at `due_at`."""

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
    A batch of `size` messages with their rows; by default CLAIMED, with a lease that has not expired.

    There is a trait for each other state: `BatchFactory(prepared=True)`; also released, sent, dead, discarded. Without `owner`,
    any relay may claim the batch again at once, despite its lease. A lease counts only if `owner` is a lane whose lock is held.
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
        dead = factory.Trait(state=State.DEAD, failures=1, last_error="refused by its broker")
        discarded = factory.Trait(state=State.DISCARDED, last_error="refused by its broker")

    topic_id = factory.LazyAttribute(lambda batch: batch.topic.id)
    message_ids = factory.LazyAttribute(
        lambda batch: [message.id for message in MessageRowFactory.create_batch(batch.size, topic=batch.topic)]
    )
    lane = 1
    first_seq = 1
    state = State.CLAIMED
    attempt = 1
    failures = 0
    lease_until = factory.LazyAttribute(lambda batch: _now() + timedelta(seconds=30) if batch.state == State.CLAIMED else None)
    due_at = _now_if(State.RELEASED)
    decided_at = _now_if(State.PREPARED)
    sent_at = _now_if(State.SENT)


class DeadMessageFactory(factory.django.DjangoModelFactory):
    """The copy of a dead message in `outbox_dead`, with its dead batch."""

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
    """An inbox row: a group has handled the message, so another delivery of it is dropped."""

    class Meta:
        model = models.Inbox

    consumer_group = "points"
    message_id = factory.LazyFunction(message_id)
    idempotency_key = factory.LazyAttribute(lambda inbox: str(inbox.message_id))
    topic = "orders"


class DeferredFactory(factory.django.DjangoModelFactory):
    """
    A message that a group has deferred, due now. With `of=message`, key, headers and body are those of `publish(message)`.

    There is a trait for each other state: `DeferredFactory(dead=True)`; also waiting, asleep, held. Set the same `order_key` for
    rows of one key.
    """

    class Meta:
        model = models.Deferred

    class Params:
        of = None
        dead = factory.Trait(
            dead_at=factory.LazyFunction(_now),
            failures=1,
            reason="failed",
            error="ValueError: no such customer",
            fingerprint="ValueError in shop.consumers.add_points: no such customer",
        )
        waiting = factory.Trait(due_at=factory.LazyFunction(lambda: _now() + timedelta(hours=1)))
        asleep = factory.Trait(due_at=None, reason="behind")
        held = factory.Trait(due_at=HELD)

    consumer_group = "points"
    message_id = factory.LazyFunction(message_id)
    own_id = factory.LazyAttribute(lambda deferred: str(deferred.message_id))
    idempotency_key = factory.SelfAttribute("own_id")
    topic = "orders"
    type = factory.LazyAttribute(lambda deferred: read_headers(deferred.headers).get(Header.TYPE, ""))
    key = _of_message("key", "")
    headers = _of_message("headers", "{}")
    body = _of_message("body", b'{"order_id": 1}')
    delivery_count = 1
    due_at = factory.LazyFunction(_now)
    reason = "failed"


class FailedDeliveryFactory(factory.django.DjangoModelFactory):
    """A failed delivery in the log; with `dead_letter=True`, the one that made the message a dead letter."""

    class Meta:
        model = models.FailedDelivery

    class Params:
        dead_letter = factory.Trait(outcome="dead letter")

    consumer_group = "points"
    message_id = factory.LazyFunction(message_id)
    topic = "orders"
    delivery_count = 1
    outcome = "retry"
    error = "ValueError: no such customer"
    fingerprint = "ValueError in shop.consumers.add_points: no such customer"


class CheckBackFactory(factory.django.DjangoModelFactory):
    """A check-back about a half message, and its answer."""

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
    "DeferredFactory",
    "DelayedFactory",
    "FailedDeliveryFactory",
    "IdentityFactory",
    "InboxFactory",
    "MessageRowFactory",
    "TicketFactory",
    "TopicFactory",
    "message_id",
]
