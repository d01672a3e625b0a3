"""Administer consumer groups as a client that is no member: their backlog, owners and positions."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import closing
from datetime import datetime
from typing import Literal

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from outbox.brokers.base import GroupPosition
from outbox.brokers.kafka.client import ANSWER_SECONDS, client_settings, member_settings
from outbox.brokers.kafka.errors import call_error, error_of
from outbox.brokers.kafka.offset_notes import NOT_READY, OffsetNote, committed_notes, require_owner
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.kafka.topics import describe_topics, existing
from outbox.brokers.owners import GroupOwner
from outbox.errors import BrokerUnavailable


def count_backlog(options: KafkaOptions, name: str, group: str, topics: Collection[str]) -> dict[str, int]:
    """
    Return the number of records behind a group's committed offsets, by topic, without topics that the group never read.

    Open transactions do not count. The end of each transaction takes an offset, so that a group without members may have counted
    some more than there are.

    Raises:
        BrokerUnavailable: the cluster does not answer.
    """
    places = _places(options, name, topics)
    if not places:
        return {}
    with closing(Consumer(member_settings(options, name, group))) as consumer:
        committed = {place: place.offset for place in committed_notes(consumer, places)}
    known = {place.topic for place, offset in committed.items() if offset >= 0}
    read = [place for place in places if place.topic in known]
    ends = read_offsets(options, name, read, OffsetSpec.latest())
    starts = read_offsets(options, name, [place for place in read if committed[place] < 0], OffsetSpec.earliest())
    positions: dict[str, int] = {}
    for place in read:
        start = committed[place] if committed[place] >= 0 else starts[place]
        positions[place.topic] = positions.get(place.topic, 0) + max(0, ends[place] - start)
    return positions


def find_positions(
    options: KafkaOptions, name: str, group: str, topics: Collection[str], to: datetime | Literal["first", "last"]
) -> list[GroupPosition]:
    """Return where a group goes on in each partition of topics, and where it would; see `Seeks.seek`."""
    places = _places(options, name, topics)
    if not places:
        return []
    with closing(Consumer(member_settings(options, name, group))) as consumer:
        committed = {place: place.offset for place in committed_notes(consumer, places)}
    starts, ends = (read_offsets(options, name, places, spec) for spec in (OffsetSpec.earliest(), OffsetSpec.latest()))
    if isinstance(to, datetime):
        since = read_offsets(options, name, places, OffsetSpec.for_timestamp(int(to.timestamp() * 1000)))
        wanted = {place: offset if offset >= 0 else ends[place] for place, offset in since.items()}
    else:
        wanted = starts if to == "first" else ends
    group_positions = []
    for place in places:
        begun = committed[place] if committed[place] >= 0 else None
        ahead = wanted[place] - max(starts[place], starts[place] if begun is None else begun)
        group_positions.append(GroupPosition(place.topic, str(place.partition), begun, wanted[place], ahead))
    return group_positions


def seek(options: KafkaOptions, name: str, group: str, positions: Collection[GroupPosition], owner: GroupOwner) -> None:
    """
    Commit other offsets for a group, which has no members; see `Seeks.seek`.

    Raises:
        BrokerUnavailable: the cluster does not answer, or the group has members.
        OwnedByAnother: another outbox has the group's inbox.
    """
    places = {TopicPartition(position.topic, int(position.queue)): position.wanted for position in positions}
    with closing(Consumer(member_settings(options, name, group))) as consumer:
        notes = committed_notes(consumer, list(places))
        require_owner(group, notes, owner)
        _commit(consumer, group, {place: (places[place], note) for place, note in notes.items()}, owner, f"move group {group!r}")


def take_over(options: KafkaOptions, name: str, group: str, topics: Collection[str], owner: GroupOwner) -> None:
    """
    Name an outbox as that of a group's inbox, beside each committed offset.

    Raises:
        BrokerUnavailable: the cluster does not answer, or the group still has members.
    """
    places = _places(options, name, topics)
    if not places:
        return
    with closing(Consumer(member_settings(options, name, group))) as consumer:
        notes = committed_notes(consumer, places)
        kept = {place: (place.offset, note) for place, note in notes.items() if place.offset >= 0}
        _commit(consumer, group, kept, owner, f"name the owner of group {group!r}")


def _commit(
    consumer: Consumer, group: str, kept: Mapping[TopicPartition, tuple[int, OffsetNote]], owner: GroupOwner, what: str
) -> None:
    """Commit offsets for a group without members, with its owner beside each."""
    offsets = [
        TopicPartition(
            place.topic,
            place.partition,
            offset,
            OffsetNote(owner.source, owner.project, note.handed_out_before).encode(),
        )
        for place, (offset, note) in kept.items()
    ]
    if not offsets:
        return
    try:
        answers = consumer.commit(offsets=offsets, asynchronous=False) or []
        for answer in answers:
            if answer.error is not None:
                raise KafkaException(answer.error)
    except KafkaException as error:
        cause = error_of(error)
        if cause is not None and cause.name() in ("UNKNOWN_MEMBER_ID", "ILLEGAL_GENERATION", "STALE_MEMBER_EPOCH"):
            raise BrokerUnavailable(
                f"Kafka's consumer group {group!r} still has members.",
                hint="Stop all consumers of the group first; those of other projects, too.",
            ) from error
        raise call_error(error, what) from error


def require_access(options: KafkaOptions, name: str, group: str) -> None:
    """
    Ask about a group, since other calls of a user that may not read for it only time out.

    Raises:
        BrokerUnavailable: the cluster does not answer.
        BrokerMisconfigured: this user may not read for the group.
    """
    admin = AdminClient(client_settings(options, name))
    deadline = time.monotonic() + 2 * ANSWER_SECONDS
    while True:
        try:
            admin.describe_consumer_groups([group], request_timeout=ANSWER_SECONDS)[group].result(2 * ANSWER_SECONDS)
            return
        except (KafkaException, TimeoutError) as error:
            cause = error_of(error)
            if cause is not None and cause.code() == KafkaError.GROUP_ID_NOT_FOUND:
                return
            if cause is None or cause.name() not in NOT_READY or time.monotonic() > deadline:
                raise call_error(error, f"describe the group {group!r}") from error
            time.sleep(0.05)


def _places(options: KafkaOptions, name: str, topics: Collection[str]) -> list[TopicPartition]:
    """Return the partitions of topics; none of a topic that does not exist."""
    there = existing(describe_topics(options, name, topics))
    return [
        TopicPartition(topic, number) for topic, description in there.items() for number in range(len(description.partitions))
    ]


def read_offsets(
    options: KafkaOptions,
    name: str,
    places: Collection[TopicPartition],
    spec: OffsetSpec,
    level: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[TopicPartition, int]:
    """Return offsets of partitions; for readers of committed records, the end is before an open transaction."""
    if not places:
        return {}
    admin = AdminClient(client_settings(options, name))
    asked = admin.list_offsets(dict.fromkeys(places, spec), isolation_level=level, request_timeout=ANSWER_SECONDS)
    try:
        return {place: int(asked[place].result(2 * ANSWER_SECONDS).offset) for place in places}
    except (KafkaException, TimeoutError) as error:
        raise call_error(error, "read the ends of topics") from error
