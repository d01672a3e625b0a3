"""Reading by consumer groups: a group's offset in each topic, and its deliveries until they are finished."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from datetime import datetime, timedelta

from msgspec.structs import replace

from outbox.brokers.base import Delivery
from outbox.brokers.memory.store import MemoryGroup, Store, UnfinishedCopy
from outbox.message import TopicSpec, TopicType


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
    """
    Yield deliveries that are due, in storage order.

    On a fifo topic a message waits for earlier ones of its key, except those that are yielded before it.
    """
    waiting_keys = set()
    due = [place for place in group.unfinished[spec.name].values() if not place.given_up]
    for place in due:
        if limit == 0:
            return
        key = place.copy.message.key
        if place.due_at > now:
            waiting_keys.add(key)
        elif spec.type is not TopicType.FIFO or key not in waiting_keys:
            limit -= 1
            yield deliver(name, place, now + invisible_for)


def given_up(group: MemoryGroup, topics: Collection[str]) -> list[UnfinishedCopy]:
    """Return what was given up in some topics."""
    return [place for topic in topics for place in group.unfinished.get(topic, {}).values() if place.given_up]


def deliver(group: str, place: UnfinishedCopy, until: datetime) -> Delivery:
    """Return a delivery, which is held until that time."""
    message = place.copy.message
    place.delivery_count += 1
    place.due_at = until
    place.receipt = _new_receipt(place)
    return Delivery(
        group=group,
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
        given_up=place.given_up,
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
    unfinished = [place.copy for place in group.unfinished.get(topic, {}).values() if not place.given_up]
    return sum(copy.visible_at <= now for copy in [*unread, *unfinished])


def open_ids(store: Store, name: str) -> set[str]:
    """Return the ids of messages that a group has not read or not finished."""
    group = store.groups.get(name)
    if group is None:
        return set()
    unread = [copy for topic, number in group.next_number.items() for copy in store.copies.get(topic, [])[number:]]
    unfinished = [place.copy for places in group.unfinished.values() for place in places.values()]
    return {copy.message.message_id for copy in [*unread, *unfinished]}


def held_by(store: Store, delivery: Delivery) -> UnfinishedCopy | None:
    """Return the place that a delivery still holds, however late it is. None: it was ended, or delivered again."""
    group = store.groups.get(delivery.group)
    number = int(delivery.receipt.split("/")[1])
    place = group.unfinished.get(delivery.topic, {}).get(number) if group else None
    return place if place is not None and place.receipt == delivery.receipt else None


def finish(store: Store, delivery: Delivery) -> bool:
    """Remove a copy from its group's unfinished messages. Return whether the delivery was held."""
    place = held_by(store, delivery)
    if place is not None:
        del store.groups[delivery.group].unfinished[delivery.topic][place.copy.number]
    return place is not None
