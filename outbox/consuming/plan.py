"""The order in which a worker handles received messages, and which it handles together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outbox.brokers.base import Delivery
from outbox.consuming import tries
from outbox.consuming.delivery_info import DeliveryInfo
from outbox.consuming.read import find_consumer
from outbox.consuming.register import Consumer, Group
from outbox.errors import UnknownMessageType


def plan(group: Group, deliveries: Sequence[Delivery]) -> list[list[Delivery]]:
    """
    Return deliveries in the order of work, in lists that are handled together.

    First deliveries come first. Redelivered messages whose last try has not ended come last: if one of them kills the process,
    the others are done.
    """
    first = [delivery for delivery in deliveries if delivery.attempt == 1]
    again = [delivery for delivery in deliveries if delivery.attempt > 1]
    return [*_together(group, first), *([one] for one in _by_risk(group, again))]


def _by_risk(group: Group, deliveries: list[Delivery]) -> list[Delivery]:
    if len(deliveries) < 2:
        return deliveries
    ids = [DeliveryInfo.of(one).message_id for one in deliveries]
    unended = tries.unended(group.name, ids, group.using)
    return [one for _, one in sorted(zip(ids, deliveries, strict=True), key=lambda pair: pair[0] in unended)]


def _together(group: Group, deliveries: list[Delivery]) -> Iterator[list[Delivery]]:
    """Group deliveries of handlers with a batch size, and those without a handler; all others stay alone."""
    collected: dict[str, list[Delivery]] = {}
    for delivery in deliveries:
        try:
            consumer = find_consumer(group, delivery)
        except UnknownMessageType:
            yield [delivery]
            continue
        if consumer and not consumer.batch_size:
            yield [delivery]
            continue
        work = collected.setdefault(consumer.subject if consumer else "", [])
        work.append(delivery)
        if _is_full(work, consumer):
            yield collected.pop(consumer.subject if consumer else "")
    yield from collected.values()


def _is_full(work: list[Delivery], consumer: Consumer | None) -> bool:
    return consumer is not None and len(work) == consumer.batch_size
