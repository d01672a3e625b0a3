"""
The marker topic of an outbox: compacted, with a partition for each lane.

The last committed record of a partition is the marker of its lane. It is read after the lane was fenced, so that no transaction
of the lane is open.
"""

from __future__ import annotations

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AclOperation, NewTopic, TopicDescription

from outbox.brokers.kafka.errors import call_error
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.kafka.reading import StillOpen, read_end, read_records
from outbox.brokers.kafka.topics import create_topic, find_topic, may, wait_for_leaders
from outbox.errors import BrokerMisconfigured

PARTITIONS = 32  # of a marker topic that the broker creates, or as many as a lane needs
TAIL = 64  # records that are read first: transactions that were aborted take offsets, too

SETTINGS = {
    "cleanup.policy": "compact",
    "segment.bytes": "1048576",
    "min.cleanable.dirty.ratio": "0.1",
    "segment.ms": "600000",
}
CREATE = (
    "Create it with {partitions} partitions or more, a lane's number being that of its partition, cleanup.policy=compact, and as "
    "many replicas as the topics of the messages have; or allow this user Create on it."
)
STAYS_OPEN = (
    "A transaction in partition {partition} of marker topic {topic!r} stays open, though Kafka says that it has ended. Nothing "
    "is sent in this lane, since the next transaction would decide about it."
)
END_IT = "kafka-transactions.sh finds it (find-hanging) and ends it (abort); what it holds has to be published again."
ALLOW = "Allow this user Read and Write on the marker topic."


def marker_topic(source: str) -> str:
    """Return the name of an outbox's marker topic."""
    return f"outbox-marker.{source.rpartition(':')[2]}"


def ensure_topic(options: KafkaOptions, name: str, topic: str, lane: int) -> None:
    """
    Create the marker topic where it is missing.

    Raises:
        BrokerUnavailable: the cluster does not answer.
        BrokerMisconfigured: this user may not create, read or write it, or it has no partition for the lane.
    """
    description = find_topic(options, name, topic, hint=ALLOW)
    if description is None:
        description = create_marker_topic(options, name, topic, lane)
    count = len(description.partitions)
    if count <= lane:
        raise BrokerMisconfigured(
            f"Marker topic {topic!r} has {count} partitions, and lane {lane} needs partition {lane}.",
            hint='Add partitions, or lower OUTBOX["RELAY"]["LANES"].',
        )
    if missing := [operation for operation in (AclOperation.READ, AclOperation.WRITE) if not may(description, operation)]:
        names = " and ".join(operation.name.title() for operation in missing)
        raise BrokerMisconfigured(f"Kafka does not allow this user {names} on marker topic {topic!r}.", hint=ALLOW)


def new_marker_topic(topic: str, lane: int) -> NewTopic:
    """Return a marker topic as it is created, with a partition for this lane and all below."""
    return NewTopic(topic, max(PARTITIONS, lane + 1), config=SETTINGS)


def create_marker_topic(options: KafkaOptions, name: str, topic: str, lane: int) -> TopicDescription:
    """Create a marker topic. Raises as `ensure_topic`."""
    create_topic(options, name, new_marker_topic(topic, lane), hint=CREATE.format(partitions=lane + 1))
    return wait_for_leaders(options, name, topic, [lane], hint=ALLOW)


def read_marker(options: KafkaOptions, name: str, topic: str, lane: int, *, is_fenced: bool = True) -> str | None:
    """
    Return the marker of a lane; None where there is none.

    Args:
        is_fenced: the lane was fenced before, so no transaction of it is open. False: the writes of an open one are not read.

    Raises:
        BrokerUnavailable: it cannot be read now. That is never the same as none.
        BrokerMisconfigured: this user may not read it.
    """
    topic_partition = TopicPartition(topic, lane)
    try:
        # A fenced lane is read with uncommitted records: another reader's end is before an open transaction.
        end = read_end(options, name, topic_partition, committed=not is_fenced)
        for start in (end - TAIL, 0):
            if records := list(read_records(options, name, topic_partition, start, end)):
                return (records[-1].value() or b"").decode()
        return None
    except StillOpen as error:
        raise BrokerMisconfigured(STAYS_OPEN.format(topic=topic, partition=lane), hint=END_IT) from error
    except (KafkaException, TimeoutError) as error:
        raise call_error(error, f"read the marker topic {topic!r}", hint=ALLOW) from error
