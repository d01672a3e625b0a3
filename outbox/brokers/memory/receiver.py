"""Reads of consumer groups: a group has an offset in each topic, and an entry for each copy that it has not acknowledged."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from datetime import datetime, timedelta

from msgspec.structs import replace

from outbox.brokers.base import Delivery
from outbox.brokers.memory.store import MemoryGroup, Store, UnfinishedCopy
from outbox.message import TopicSpec, TopicType


def join(store: Store, name: str, topics: Collection[str], *, at_end: bool) -> MemoryGroup:
    """Return a group. It begins to read new topics at the first message, or with `at_end` after the last one."""
    group = store.groups.setdefault(name, MemoryGroup())
    for topic in topics:
        group.next_number.setdefault(topic, len(store.copies.get(topic, ())) if at_end else 0)
    return group


def read_new(store: Store, group: MemoryGroup, topic: str) -> None:
    """Add entries for the copies that a group has not read yet."""
    entries = group.unfinished.setdefault(topic, {})
    copies = store.copies.get(topic, [])
    for copy in copies[group.next_number[topic] :]:
        entries[copy.number] = UnfinishedCopy(copy, copy.visible_at)
    group.next_number[topic] = len(copies)


def take_due(
    group: MemoryGroup, name: str, spec: TopicSpec, *, now: datetime, limit: int, invisible_for: timedelta
) -> Iterator[Delivery]:
    """
    Yield deliveries that are due, in storage order.

    On a fifo topic, a message waits until earlier ones of its key are acknowledged, unless they are yielded before it.
    """
    waiting_keys = set()
    due = [entry for entry in group.unfinished[spec.name].values() if not entry.dead_letter_reason]
    for entry in due:
        if limit == 0:
            return
        key = entry.copy.message.key
        if entry.due_at > now:
            waiting_keys.add(key)
        elif spec.type is not TopicType.FIFO or key not in waiting_keys:
            limit -= 1
            yield deliver(name, entry, now + invisible_for)


def dead_letters(group: MemoryGroup, topics: Collection[str]) -> list[UnfinishedCopy]:
    """Return the entries of messages that were given up in some topics."""
    return [entry for topic in topics for entry in group.unfinished.get(topic, {}).values() if entry.dead_letter_reason]


def deliver(group: str, entry: UnfinishedCopy, until: datetime) -> Delivery:
    """Return a new delivery of an entry, which is held until that time."""
    message = entry.copy.message
    entry.delivery_count += 1
    entry.due_at = until
    entry.receipt = _new_receipt(entry)
    return Delivery(
        group=group,
        topic=message.topic,
        message_id=message.message_id,
        body=message.body,
        receipt=entry.receipt,
        key=message.key,
        tag=message.tag,
        headers=dict(message.headers),
        delivery_count=entry.delivery_count,
        stored_at=entry.copy.stored_at,
        pos=entry.copy.number,
        dead_letter_reason=entry.dead_letter_reason,
    )


def _new_receipt(entry: UnfinishedCopy) -> str:
    return f"{entry.copy.message.topic}/{entry.copy.number}/{uuid.uuid4().hex}"


def renew(store: Store, delivery: Delivery, until: datetime) -> Delivery | None:
    """Hold a delivery until that time, and return it with a new receipt; None if it is no longer held."""
    entry = held_entry(store, delivery)
    if entry is None:
        return None
    entry.due_at = until
    entry.receipt = _new_receipt(entry)
    return replace(delivery, receipt=entry.receipt)


def count_waiting(store: Store, group: MemoryGroup, topic: str, now: datetime) -> int:
    """Return the number of messages that a group has not read or not acknowledged, without delayed ones."""
    unread = store.copies.get(topic, [])[group.next_number[topic] :]
    unfinished = [entry.copy for entry in group.unfinished.get(topic, {}).values() if not entry.dead_letter_reason]
    return sum(copy.visible_at <= now for copy in [*unread, *unfinished])


def unfinished_ids(store: Store, name: str) -> set[str]:
    """Return the ids of messages that a group has not read or not acknowledged."""
    group = store.groups.get(name)
    if group is None:
        return set()
    unread = [copy for topic, number in group.next_number.items() for copy in store.copies.get(topic, [])[number:]]
    unfinished = [entry.copy for entries in group.unfinished.values() for entry in entries.values()]
    return {copy.message.message_id for copy in [*unread, *unfinished]}


def held_entry(store: Store, delivery: Delivery) -> UnfinishedCopy | None:
    """Return the entry of a delivery, even an expired one; None if it was acknowledged, or delivered again."""
    group = store.groups.get(delivery.group)
    number = int(delivery.receipt.split("/")[1])
    entry = group.unfinished.get(delivery.topic, {}).get(number) if group else None
    return entry if entry is not None and entry.receipt == delivery.receipt else None


def finish(store: Store, delivery: Delivery) -> bool:
    """Remove the entry of a delivery. Return whether the delivery was still held."""
    entry = held_entry(store, delivery)
    if entry is not None:
        del store.groups[delivery.group].unfinished[delivery.topic][entry.copy.number]
    return entry is not None
