"""Helpers for tests of commits: send half messages, claim a batch again, read ends."""

from datetime import timedelta

from outbox import database
from outbox.batches.batch import BatchSendResult
from outbox.brokers.base import Ended, HalfRef
from outbox.brokers.memory import MemoryBroker
from outbox.models import Batch
from outbox.outages import Backoff
from outbox.relay.breaker import Breaker, Breakers
from outbox.relay.send import Sender


def send_halves(broker: MemoryBroker, *batches) -> list[BatchSendResult]:
    breakers = Breakers(lambda: Breaker(3, Backoff(timedelta(0), timedelta(0))))
    sender = Sender(database.raw("default"), broker, breakers, "urn:uuid:1", lambda: False)
    return sender.send(batches, is_half=True, shed_at=float("inf"))


def take_over(batch, **fields) -> None:
    """Change a batch as another relay does that claims it again."""
    Batch.objects.filter(pk=batch.id).update(**{"attempt": batch.attempt + 1} | fields)


def ended(broker: MemoryBroker) -> list[Ended | None]:
    return [half.ended for half in broker.halves()]


def half_of(broker: MemoryBroker, batch: Batch, position: int = 1) -> HalfRef:
    return HalfRef(broker.halves()[0].message.topic, batch.half_ids[position - 1], str(batch.message_ids[position - 1]))
