"""What a client that is no member asks about consumer groups: what waits, and whose they are."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import closing

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from outbox.brokers.kafka.client import ANSWER_SECONDS, client_settings, member_settings
from outbox.brokers.kafka.errors import call_error, error_of
from outbox.brokers.kafka.group_topics import GroupTopics
from outbox.brokers.kafka.offset_notes import NOT_READY, OffsetNote, committed_notes
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.kafka.topics import describe_topics
from outbox.brokers.owners import GroupOwner
from outbox.errors import BrokerUnavailable


def count_backlog(options: KafkaOptions, name: str, group: str, topics: Collection[str]) -> dict[str, int]:
    """
    Return the number of records behind a group's committed offsets, by topic, retries included. It has no topic that the group
    never read.

    Open transactions do not count. The end of each transaction takes an offset, so that a group without members may have counted
    some more than there are.

    Raises:
        BrokerUnavailable: the cluster does not answer.
    """
    stored = {one: topic for topic in topics for one in (topic, GroupTopics.of(topic, group).retry)}
    places = _places(options, name, stored)
    if not places:
        return {}
    with closing(Consumer(member_settings(options, name, group))) as consumer:
        committed = {place: place.offset for place in committed_notes(consumer, places)}
    known = {place.topic for place, offset in committed.items() if offset >= 0}
    known |= {retry for retry, topic in stored.items() if topic in known}
    read = [place for place in places if place.topic in known]
    ends = _offsets(options, name, read, OffsetSpec.latest())
    starts = _offsets(options, name, [place for place in read if committed[place] < 0], OffsetSpec.earliest())
    found: dict[str, int] = {}
    for place in read:
        start = committed[place] if committed[place] >= 0 else starts[place]
        found[stored[place.topic]] = found.get(stored[place.topic], 0) + max(0, ends[place] - start)
    return found


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
        offsets = [
            TopicPartition(
                place.topic,
                place.partition,
                place.offset,
                OffsetNote(owner.source, owner.project, note.handed_out_before).encode(),
            )
            for place, note in notes.items()
            if place.offset >= 0
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
                    hint="Stop all consumers of the group first; those of the other project, too.",
                ) from error
            raise call_error(error, f"name the owner of group {group!r}") from error


def count_members(options: KafkaOptions, name: str, group: str) -> int:
    """
    Return the number of a group's members.

    Raises:
        BrokerUnavailable: the cluster does not answer.
        BrokerMisconfigured: this user may not read for the group, of which other calls say only that they timed out.
    """
    admin = AdminClient(client_settings(options, name))
    deadline = time.monotonic() + 2 * ANSWER_SECONDS
    while True:
        try:
            asked = admin.describe_consumer_groups([group], request_timeout=ANSWER_SECONDS)
            return len(asked[group].result(2 * ANSWER_SECONDS).members)
        except (KafkaException, TimeoutError) as error:
            cause = error_of(error)
            if cause is not None and cause.code() == KafkaError.GROUP_ID_NOT_FOUND:
                return 0
            if cause is None or cause.name() not in NOT_READY or time.monotonic() > deadline:
                raise call_error(error, f"describe the group {group!r}") from error
            time.sleep(0.05)


def _places(options: KafkaOptions, name: str, topics: Collection[str]) -> list[TopicPartition]:
    """Return the partitions of topics; none of a topic that does not exist."""
    found = describe_topics(options, name, topics)
    there = {topic: one for topic, one in found.items() if not isinstance(one, KafkaError)}
    return [TopicPartition(topic, number) for topic, one in there.items() for number in range(len(one.partitions))]


def _offsets(options: KafkaOptions, name: str, places: Collection[TopicPartition], spec: OffsetSpec) -> dict[TopicPartition, int]:
    if not places:
        return {}
    admin = AdminClient(client_settings(options, name))
    asked = admin.list_offsets(
        dict.fromkeys(places, spec), isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=ANSWER_SECONDS
    )
    try:
        return {place: int(asked[place].result(2 * ANSWER_SECONDS).offset) for place in places}
    except (KafkaException, TimeoutError) as error:
        raise call_error(error, "read the ends of topics") from error
