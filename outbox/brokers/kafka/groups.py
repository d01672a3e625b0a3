"""Administration of consumer groups, by a client that is not a member: their backlog, owners and positions."""

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
from outbox.brokers.kafka.topics import describe_topics, existing_topics
from outbox.brokers.owners import GroupOwner
from outbox.errors import BrokerUnavailable


def count_backlog(options: KafkaOptions, name: str, group: str, topics: Collection[str]) -> dict[str, int]:
    """
    Return the number of records from a group's committed offsets on, by topic, without topics that the group never read.

    Records from an unfinished transaction on are not counted. Transaction markers are counted, since they take offsets, so the
    backlog of a group without members may be a little too high.

    Raises:
        BrokerUnavailable: the cluster does not answer.
    """
    topic_partitions = _partitions_of(options, name, topics)
    if not topic_partitions:
        return {}
    with closing(Consumer(member_settings(options, name, group))) as consumer:
        committed = {topic_partition: topic_partition.offset for topic_partition in committed_notes(consumer, topic_partitions)}
    known = {topic_partition.topic for topic_partition, offset in committed.items() if offset >= 0}
    read = [topic_partition for topic_partition in topic_partitions if topic_partition.topic in known]
    ends = read_offsets(options, name, read, OffsetSpec.latest())
    starts = read_offsets(
        options, name, [topic_partition for topic_partition in read if committed[topic_partition] < 0], OffsetSpec.earliest()
    )
    counts: dict[str, int] = {}
    for topic_partition in read:
        start = committed[topic_partition] if committed[topic_partition] >= 0 else starts[topic_partition]
        counts[topic_partition.topic] = counts.get(topic_partition.topic, 0) + max(0, ends[topic_partition] - start)
    return counts


def find_positions(
    options: KafkaOptions, name: str, group: str, topics: Collection[str], to: datetime | Literal["first", "last"]
) -> list[GroupPosition]:
    """Return the current and the wanted position of a group in each partition of topics; see `Seeks.seek`."""
    topic_partitions = _partitions_of(options, name, topics)
    if not topic_partitions:
        return []
    with closing(Consumer(member_settings(options, name, group))) as consumer:
        committed = {topic_partition: topic_partition.offset for topic_partition in committed_notes(consumer, topic_partitions)}
    starts, ends = (read_offsets(options, name, topic_partitions, spec) for spec in (OffsetSpec.earliest(), OffsetSpec.latest()))
    if isinstance(to, datetime):
        since = read_offsets(options, name, topic_partitions, OffsetSpec.for_timestamp(int(to.timestamp() * 1000)))
        wanted = {topic_partition: offset if offset >= 0 else ends[topic_partition] for topic_partition, offset in since.items()}
    else:
        wanted = starts if to == "first" else ends
    group_positions = []
    for topic_partition in topic_partitions:
        current = committed[topic_partition] if committed[topic_partition] >= 0 else None
        ahead = wanted[topic_partition] - max(starts[topic_partition], starts[topic_partition] if current is None else current)
        group_positions.append(
            GroupPosition(topic_partition.topic, str(topic_partition.partition), current, wanted[topic_partition], ahead)
        )
    return group_positions


def seek(options: KafkaOptions, name: str, group: str, positions: Collection[GroupPosition], owner: GroupOwner) -> None:
    """
    Commit new offsets for a group without members; see `Seeks.seek`.

    Raises:
        BrokerUnavailable: the cluster does not answer, or the group has members.
        OwnedByAnother: the group has its inbox in another outbox.
    """
    topic_partitions = {TopicPartition(position.topic, int(position.queue)): position.wanted for position in positions}
    with closing(Consumer(member_settings(options, name, group))) as consumer:
        notes = committed_notes(consumer, list(topic_partitions))
        require_owner(group, notes, owner)
        _commit(
            consumer,
            group,
            {topic_partition: (topic_partitions[topic_partition], note) for topic_partition, note in notes.items()},
            owner,
            f"move group {group!r}",
        )


def take_over(options: KafkaOptions, name: str, group: str, topics: Collection[str], owner: GroupOwner) -> None:
    """
    Store a new owner of a group in the metadata of each committed offset.

    Raises:
        BrokerUnavailable: the cluster does not answer, or the group still has members.
    """
    topic_partitions = _partitions_of(options, name, topics)
    if not topic_partitions:
        return
    with closing(Consumer(member_settings(options, name, group))) as consumer:
        notes = committed_notes(consumer, topic_partitions)
        kept = {
            topic_partition: (topic_partition.offset, note)
            for topic_partition, note in notes.items()
            if topic_partition.offset >= 0
        }
        _commit(consumer, group, kept, owner, f"name the owner of group {group!r}")


def _commit(
    consumer: Consumer, group: str, wanted: Mapping[TopicPartition, tuple[int, OffsetNote]], owner: GroupOwner, action: str
) -> None:
    """
    Commit offsets for a group without members, with its owner in the metadata of each.

    Args:
        wanted: topic-partition -> the offset to commit, and the current note, whose `handed_out_before` is kept.
        action: for the text of an error; see `call_error`.
    """
    offsets = [
        TopicPartition(
            topic_partition.topic,
            topic_partition.partition,
            offset,
            OffsetNote(owner.source, owner.project, note.handed_out_before).encode(),
        )
        for topic_partition, (offset, note) in wanted.items()
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
                hint="Stop all consumers of the group first, also those of other projects.",
            ) from error
        raise call_error(error, action) from error


def require_access(options: KafkaOptions, name: str, group: str) -> None:
    """
    Check that this user may read for a group. Without this permission, other calls only time out.

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


def _partitions_of(options: KafkaOptions, name: str, topics: Collection[str]) -> list[TopicPartition]:
    """Return the partitions of topics; none of a topic that does not exist."""
    existing = existing_topics(describe_topics(options, name, topics))
    return [
        TopicPartition(topic, number) for topic, description in existing.items() for number in range(len(description.partitions))
    ]


def read_offsets(
    options: KafkaOptions,
    name: str,
    topic_partitions: Collection[TopicPartition],
    spec: OffsetSpec,
    level: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[TopicPartition, int]:
    """Return the offset of each partition that `spec` describes. With READ_COMMITTED, the latest is the last stable offset."""
    if not topic_partitions:
        return {}
    admin = AdminClient(client_settings(options, name))
    asked = admin.list_offsets(dict.fromkeys(topic_partitions, spec), isolation_level=level, request_timeout=ANSWER_SECONDS)
    try:
        return {
            topic_partition: int(asked[topic_partition].result(2 * ANSWER_SECONDS).offset) for topic_partition in topic_partitions
        }
    except (KafkaException, TimeoutError) as error:
        raise call_error(error, "read offsets of topics") from error
