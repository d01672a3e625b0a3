"""The metadata of a group's committed offsets: the owner of the group, and the bound of records that may be handed out."""

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

# Transient errors: the group's coordinator is being elected or loaded, or a transaction is committing offsets.
NOT_READY = {"NOT_COORDINATOR", "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS", "UNSTABLE_OFFSET_COMMIT"}
MAX_PROJECT_LENGTH = 200  # characters; Kafka limits the metadata to 4,096 bytes


class OffsetNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    The metadata of a committed offset.

    Args:
        source, project: the owner of the group, which is the outbox that has the group's inbox; "" if unknown.
        handed_out_before: records from the committed offset up to, but without, this one may have been handed out. 0: none of
            them was.
        topic_id: the id of the offset's topic. A topic that is created again with the same name has another id. "": unknown.
    """

    source: str = ""
    project: str = ""
    handed_out_before: int = 0
    topic_id: str = ""

    def encode(self) -> str:
        """Return the note as text, for the metadata of an offset."""
        shorter = replace(self, project=self.project[:MAX_PROJECT_LENGTH])
        return msgspec.json.encode(shorter).decode()

    @classmethod
    def read(cls, text: str | None) -> OffsetNote:
        """Return the note in the metadata of an offset; an empty one if another program has committed the offset."""
        prepare(cls)
        try:
            return msgspec.json.decode(text or "{}", type=cls)
        except msgspec.DecodeError:
            return cls()


def committed_notes(consumer: Consumer, topic_partitions: Sequence[TopicPartition]) -> dict[TopicPartition, OffsetNote]:
    """
    Return the committed offsets of partitions with their notes, in the order of the partitions.

    The offset in a key is below 0 if none is committed.

    Raises:
        BrokerUnavailable: the offsets cannot be read now.
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
    """Raise OwnedByAnother if the note of a committed offset names another outbox."""
    for topic_partition, note in notes.items():
        theirs = GroupOwner(note.source, note.project)
        if ours.source and theirs.source and theirs.source != ours.source:
            subject = f"Kafka's consumer group {group!r} (topic {topic_partition.topic!r})"
            raise OwnedByAnother(subject, group, theirs, ours, separation="a prefix of its own for its groups")
