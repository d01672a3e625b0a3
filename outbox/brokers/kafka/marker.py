"""
The marker topic of an outbox: compacted, with a partition for each lane.

The last committed record of a partition is the marker of its lane. A relay reads it after it has fenced the lane's earlier
holders out, so that no transaction of the lane is unfinished.
"""

from __future__ import annotations

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AclOperation, NewTopic, TopicDescription

from outbox.brokers.kafka.errors import call_error
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.kafka.reading import StillOpen, read_end, read_records
from outbox.brokers.kafka.topics import create_topic, find_topic, is_allowed, wait_for_leaders
from outbox.errors import BrokerMisconfigured

PARTITIONS = 32  # the number of partitions of a new marker topic; more if the lane's number is higher
TAIL = 64  # how many of the last offsets are read at first; several, because those of aborted transactions yield no record

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
    "is sent in this lane, because the end of the next transaction would also commit or abort that one."
)
END_IT = "Find it (find-hanging) and end it (abort) with kafka-transactions.sh; then publish its messages again."
ALLOW = "Allow this user Read and Write on the marker topic."


def marker_topic(source: str) -> str:
    """Return the name of an outbox's marker topic."""
    return f"outbox-marker.{source.rpartition(':')[2]}"


def ensure_topic(options: KafkaOptions, name: str, topic: str, lane: int) -> None:
    """
    Create the marker topic if it is missing, and check that the lane can use it.

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
    if missing := [operation for operation in (AclOperation.READ, AclOperation.WRITE) if not is_allowed(description, operation)]:
        names = " and ".join(operation.name.title() for operation in missing)
        raise BrokerMisconfigured(f"Kafka does not allow this user {names} on marker topic {topic!r}.", hint=ALLOW)


def new_marker_topic(topic: str, lane: int) -> NewTopic:
    """Return the definition of a new marker topic, with partitions for this lane and all lower ones."""
    return NewTopic(topic, max(PARTITIONS, lane + 1), config=SETTINGS)


def create_marker_topic(options: KafkaOptions, name: str, topic: str, lane: int) -> TopicDescription:
    """Create a marker topic and return its description. Raises the same errors as `ensure_topic`."""
    create_topic(options, name, new_marker_topic(topic, lane), hint=CREATE.format(partitions=lane + 1))
    return wait_for_leaders(options, name, topic, [lane], hint=ALLOW)


def read_marker(options: KafkaOptions, name: str, topic: str, lane: int, *, is_fenced: bool = True) -> str | None:
    """
    Return the marker of a lane; None if there is none.

    Args:
        is_fenced: earlier holders were fenced out, so no transaction of the lane is unfinished. False: read only up to the
            records of an unfinished transaction.

    Raises:
        BrokerUnavailable: the marker cannot be read now, which does not mean that there is none.
        BrokerMisconfigured: this user may not read the marker, or a transaction stays open.
    """
    topic_partition = TopicPartition(topic, lane)
    try:
        # The end of a fenced lane counts uncommitted records, so that a transaction that stays open is noticed (StillOpen).
        end = read_end(options, name, topic_partition, committed=not is_fenced)
        for start in (end - TAIL, 0):
            if records := list(read_records(options, name, topic_partition, start, end)):
                return (records[-1].value() or b"").decode()
        return None
    except StillOpen as error:
        raise BrokerMisconfigured(STAYS_OPEN.format(topic=topic, partition=lane), hint=END_IT) from error
    except (KafkaException, TimeoutError) as error:
        raise call_error(error, f"read the marker topic {topic!r}", hint=ALLOW) from error
