"""The metadata of a group's committed offsets: its owner, and the offsets up to which it has handed messages out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
from confluent_kafka import Consumer, KafkaException, TopicPartition
from msgspec.structs import replace

from outbox.brokers.kafka.client import ANSWER_SECONDS
from outbox.brokers.kafka.errors import call_error, error_of
from outbox.brokers.owners import GroupOwner, OwnedByAnother
from outbox.message import prepare

# The group's coordinator is being chosen or loaded, or a transaction commits offsets.
NOT_READY = {"NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS", "UNSTABLE_OFFSET_COMMIT"}
LONGEST_PROJECT = 200  # characters; Kafka takes 4,096 bytes


class OffsetNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    The metadata of a committed offset.

    Args:
        source, project: the outbox with the group's inbox; "" where it is not known.
        handed_out_before: records before this offset may have been handed out and not finished.
        topic_id: of the topic that the offset is of; one that is created again under its name has another. "": unknown.
    """

    source: str = ""
    project: str = ""
    handed_out_before: int = 0
    topic_id: str = ""

    def encode(self) -> str:
        """Return the metadata's text."""
        shorter = replace(self, project=self.project[:LONGEST_PROJECT])
        return msgspec.json.encode(shorter).decode()

    @classmethod
    def read(cls, text: str | None) -> OffsetNote:
        """Return the note in a text; an empty one where another program has committed the offset."""
        prepare(cls)
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except msgspec.DecodeError:
            return cls()


def committed_notes(consumer: Consumer, topic_partitions: Sequence[TopicPartition]) -> dict[TopicPartition, OffsetNote]:
    """
    Return the committed offsets of partitions, below 0 where there is none, with their notes, in the order of the partitions.

    Raises:
        BrokerUnavailable: they cannot be read now.
        BrokerMisconfigured: this user may not read them.
    """
    deadline = time.monotonic() + 2 * ANSWER_SECONDS
    while True:
        try:
            committed = consumer.committed(list(topic_partitions), timeout=2 * ANSWER_SECONDS)
            for topic_partition in committed:
                if topic_partition.error is not None:
                    raise KafkaException(topic_partition.error)
            break
        except KafkaException as error:
            cause = error_of(error)
            if cause is None or cause.name() not in NOT_READY or time.monotonic() > deadline:
                raise call_error(error, "read the offsets of a group") from error
            time.sleep(0.05)
    by_key = {(partition.topic, partition.partition): partition for partition in committed}
    ordered = [by_key[topic_partition.topic, topic_partition.partition] for topic_partition in topic_partitions]
    return {topic_partition: OffsetNote.read(topic_partition.metadata) for topic_partition in ordered}


def require_owner(group: str, notes: Mapping[TopicPartition, OffsetNote], ours: GroupOwner) -> None:
    """Raise OwnedByAnother where a committed offset names another outbox."""
    for topic_partition, note in notes.items():
        theirs = GroupOwner(note.source, note.project)
        if ours.source and theirs.source and theirs.source != ours.source:
            subject = f"Kafka's consumer group {group!r} (topic {topic_partition.topic!r})"
            raise OwnedByAnother(subject, group, theirs, ours, apart="a prefix of its own for its groups")
