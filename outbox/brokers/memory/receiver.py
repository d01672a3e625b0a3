"""Reading by consumer groups: a group's offset in each topic, and its deliveries until they are finished."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from outbox.brokers.base import BrokerDeadLetter, Delivery
from outbox.brokers.memory.store import Copy, MemoryGroup, Store, UnfinishedCopy
from outbox.message import Header, TopicSpec, TopicType


def join(store: Store, name: str, topics: Collection[str], *, at_end: bool) -> MemoryGroup:
    """Return a group; it begins to read a topic at the first message, or `at_end` after the last one."""
    group = store.groups.setdefault(name, MemoryGroup())
    for topic in topics:
        group.next_number.setdefault(topic, len(store.copies.get(topic, ())) if at_end else 0)
    return group


def read_new(store: Store, group: MemoryGroup, topic: str) -> None:
    """Read the copies that a group has not read yet."""
    places = group.unfinished.setdefault(topic, {})
    copies = store.copies.get(topic, [])
    for copy in copies[group.next_number[topic] :]:
        places[copy.number] = UnfinishedCopy(copy, copy.visible_at)
    group.next_number[topic] = len(copies)


def take(
    group: MemoryGroup, name: str, spec: TopicSpec, *, now: datetime, limit: int, invisible_for: timedelta
) -> Iterator[Delivery]:
    """Yield deliveries that are due, in storage order; on a fifo topic, a key waits for its first unfinished message."""
    held_keys = set()
    left = limit
    for place in list(group.unfinished[spec.name].values()):
        if left == 0:
            return
        is_held = place.copy.message.key in held_keys
        if spec.type is TopicType.FIFO:
            held_keys.add(place.copy.message.key)
        if not is_held and place.due_at <= now:
            left -= 1
            yield _deliver(group, name, place, now + invisible_for)


def _deliver(group: MemoryGroup, name: str, place: UnfinishedCopy, until: datetime) -> Delivery:
    message = place.copy.message
    place.delivery_count += 1
    place.due_at = until
    place.receipt = _new_receipt(place)
    group.delivered.append(message.message_id)
    return Delivery(
        group=name,
        topic=message.topic,
        message_id=message.message_id,
        body=message.body,
        receipt=place.receipt,
        key=message.key,
        tag=message.tag,
        headers=dict(message.headers),
        delivery_count=place.delivery_count,
        stored_at=place.copy.stored_at,
        pos=place.copy.number,
    )


def _new_receipt(place: UnfinishedCopy) -> str:
    return f"{place.copy.message.topic}/{place.copy.number}/{uuid.uuid4().hex}"


def renew(store: Store, delivery: Delivery, until: datetime) -> Delivery | None:
    """Hold a delivery until that time, under a new receipt. None: it is no longer held."""
    place = held_by(store, delivery)
    if place is None:
        return None
    place.due_at = until
    place.receipt = _new_receipt(place)
    return replace(delivery, receipt=place.receipt)


def count_waiting(store: Store, group: MemoryGroup, topic: str, now: datetime) -> int:
    """Return the number of messages that a group has not read or not finished, without delayed ones."""
    unread = store.copies.get(topic, [])[group.next_number[topic] :]
    unfinished = [place.copy for place in group.unfinished.get(topic, {}).values()]
    return sum(copy.visible_at <= now for copy in [*unread, *unfinished])


def redeliver(store: Store, group: MemoryGroup, copies: Iterable[Copy], now: datetime) -> None:
    """Make copies due for a group as if for the first time, and wake waiting consumers."""
    for copy in copies:
        group.unfinished[copy.message.topic][copy.number] = UnfinishedCopy(copy, now)
    store.changed.notify_all()


def open_ids(store: Store, name: str) -> set[str]:
    """Return the ids of messages that may be delivered to a group: dead letters, too, because they can be replayed."""
    group = store.groups.get(name)
    if group is None:
        return set()
    unread = [copy for topic, number in group.next_number.items() for copy in store.copies.get(topic, [])[number:]]
    unfinished = [place.copy for places in group.unfinished.values() for place in places.values()]
    dead = [copy for _, copy in group.dead.values()]
    return {copy.message.message_id for copy in [*unread, *unfinished, *dead]}


def release(store: Store, delivery: Delivery, due_at: datetime) -> bool:
    """End a delivery; its message is due at that time. Return whether it was held."""
    place = held_by(store, delivery)
    if place is not None:
        place.receipt = ""
        place.due_at = due_at
    return place is not None


def held_by(store: Store, delivery: Delivery) -> UnfinishedCopy | None:
    """Return the place that a delivery still holds, however late it is. None: it was ended, or delivered again."""
    group = store.groups.get(delivery.group)
    number = int(delivery.receipt.split("/")[1])
    place = group.unfinished.get(delivery.topic, {}).get(number) if group else None
    return place if place is not None and place.receipt == delivery.receipt else None


def finish(group: MemoryGroup, copy: Copy) -> None:
    """Move a copy from a group's unfinished messages to its finished ones."""
    group.unfinished[copy.message.topic].pop(copy.number)
    group.done.setdefault(copy.message.message_id, []).append(copy)


def letter(delivery: Delivery, reason: str, now: datetime) -> BrokerDeadLetter:
    """Return the dead letter of a delivery."""
    return BrokerDeadLetter(
        id=uuid.uuid4().hex,
        group=delivery.group,
        topic=delivery.topic,
        message_id=delivery.message_id,
        reason=reason,
        delivery_count=delivery.delivery_count,
        died_at=now,
        source=delivery.headers.get(Header.SOURCE, ""),
    )
