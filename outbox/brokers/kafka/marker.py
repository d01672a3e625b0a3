"""
The marker topic of an outbox: compacted, with a partition for each lane.

The last committed record of a partition is the marker of its lane. It is read after the lane was fenced, so that no transaction
of the lane is open.
"""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from outbox.brokers.kafka.client import ANSWER_SECONDS, client_settings, reader_settings
from outbox.brokers.kafka.errors import call_error, error_of
from outbox.brokers.kafka.options import KafkaOptions
from outbox.errors import BrokerMisconfigured, BrokerUnavailable

PARTITIONS = 32  # of a marker topic that the broker creates, or as many as a lane needs
READ_SECONDS = 10.0
TAIL = 64  # records that are read first: transactions that were aborted take offsets, too

SETTINGS = {
    "cleanup.policy": "compact",
    "segment.bytes": "1048576",
    "min.cleanable.dirty.ratio": "0.1",
    "segment.ms": "600000",
}
NO_LEADER = {"NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE", "FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH"}
CREATE = (
    "Create it with {partitions} partitions or more, a lane's number being that of its partition, cleanup.policy=compact, and as "
    "many replicas as the topics of the messages have; or allow this user Create on it."
)


def marker_topic(source: str) -> str:
    """Return the name of an outbox's marker topic."""
    return f"outbox-marker.{source.rpartition(':')[2]}"


def ensure_topic(options: KafkaOptions, name: str, topic: str, lane: int) -> None:
    """
    Create the marker topic where it is missing.

    Raises:
        BrokerUnavailable: the cluster does not answer.
        BrokerMisconfigured: the topic may not be created here, or has no partition for the lane.
    """
    admin = AdminClient(client_settings(options, name))
    count = len(_partitions(admin, topic))
    if not count:
        try:
            for created in admin.create_topics([NewTopic(topic, max(PARTITIONS, lane + 1), config=SETTINGS)]).values():
                created.result(READ_SECONDS)
        except KafkaException as error:
            cause = error_of(error)
            if cause is None or cause.name() != "TOPIC_ALREADY_EXISTS":  # another relay was first
                raise BrokerMisconfigured(
                    f"Marker topic {topic!r} does not exist, and Kafka did not create it ({cause and cause.str()}).",
                    hint=CREATE.format(partitions=lane + 1),
                ) from error
        count = _wait_for(admin, topic, lane)
    if count <= lane:
        raise BrokerMisconfigured(
            f"Marker topic {topic!r} has {count} partitions, and lane {lane} needs partition {lane}.",
            hint='Add partitions, or lower OUTBOX["RELAY"]["LANES"].',
        )


def read_marker(options: KafkaOptions, name: str, topic: str, lane: int) -> str | None:
    """
    Return the marker of a lane; None where there is none. The lane was fenced before.

    Raises:
        BrokerUnavailable: it cannot be read now. That is never the same as none.
        BrokerMisconfigured: this user may not read it.
    """
    place = TopicPartition(topic, lane)
    try:
        end = _read_end(options, name, place)
        found = _read_last(options, name, place, end - TAIL, end)
        return _read_last(options, name, place, 0, end) if found is None else found
    except KafkaException as error:
        raise call_error(error, f"read the marker topic {topic!r}") from error


def _read_end(options: KafkaOptions, name: str, place: TopicPartition) -> int:
    """Return the offset after the last record of a partition; waits while it has no leader."""
    deadline = time.monotonic() + READ_SECONDS
    while True:
        admin = AdminClient(client_settings(options, name))  # a new one: one that outlived a restart may answer with an error
        # As a reader of uncommitted records: another reader's end is before an open transaction.
        asked = admin.list_offsets({place: OffsetSpec.latest()}, isolation_level=IsolationLevel.READ_UNCOMMITTED)
        try:
            return int(asked[place].result(READ_SECONDS).offset)
        except KafkaException as error:
            cause = error_of(error)
            if cause is None or cause.name() not in NO_LEADER or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _read_last(options: KafkaOptions, name: str, place: TopicPartition, start: int, end: int) -> str | None:
    """Return the last committed record from an offset up to the end; None where there is none."""
    consumer = Consumer(reader_settings(options, name))  # a new one: after a second `assign`, `position` is that of the first
    try:
        low, _ = consumer.get_watermark_offsets(place, timeout=READ_SECONDS)
        return _read_from(consumer, place, max(low, start), end) if low < end else None
    finally:
        consumer.close()


def _read_from(consumer: Consumer, place: TopicPartition, start: int, end: int) -> str | None:
    consumer.assign([TopicPartition(place.topic, place.partition, start)])
    deadline = time.monotonic() + READ_SECONDS
    last: bytes | None = None
    problem: Any = None
    while consumer.position([place])[0].offset < end:  # the ends of transactions move it without a message
        message = consumer.poll(0.05)
        if message is not None and message.error() is None:
            last = message.value()
        elif message is not None:
            problem = message.error()
        if time.monotonic() > deadline:
            cause = KafkaException(problem) if problem is not None else TimeoutError(f"no end within {READ_SECONDS:g} s")
            raise call_error(cause, f"read the marker topic {place.topic!r} up to its end")
    return None if last is None else last.decode()


def _partitions(admin: AdminClient, topic: str) -> dict[int, Any]:
    """Return a topic's partitions by number; none where there is no such topic."""
    try:
        found = admin.list_topics(topic, timeout=ANSWER_SECONDS).topics.get(topic)
    except KafkaException as error:
        raise call_error(error, f"look the topic {topic!r} up") from error
    if found is None or (found.error is not None and found.error.name() == "UNKNOWN_TOPIC_OR_PART"):
        return {}
    if found.error is not None and not found.partitions:
        raise call_error(KafkaException(found.error), f"look the topic {topic!r} up")
    return dict(found.partitions)


def _wait_for(admin: AdminClient, topic: str, lane: int) -> int:
    """Wait until a new topic has its partitions, and that of a lane has a leader; return their number."""
    deadline = time.monotonic() + READ_SECONDS
    while True:
        found = _partitions(admin, topic)
        if found and (lane not in found or found[lane].leader >= 0):
            return len(found)
        if time.monotonic() > deadline:
            raise BrokerUnavailable(f"Marker topic {topic!r} was created, and has no leader after {READ_SECONDS:g} s.")
        time.sleep(0.05)
