"""Reads partitions up to their end, without a consumer group."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from outbox.brokers.kafka.client import client_settings, reader_settings
from outbox.brokers.kafka.errors import error_of
from outbox.brokers.kafka.options import KafkaOptions

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

READ_SECONDS = 10.0
POLL_SECONDS = 0.05
MAX_RECORDS = 500  # per call of `consume`
NO_LEADER = {"NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE", "FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH"}


class StillOpen(TimeoutError):
    """Raised when read_committed consumers cannot read up to an offset, since a transaction before it is unfinished."""


def read_end(options: KafkaOptions, name: str, topic_partition: TopicPartition, *, committed: bool = False) -> int:
    """
    Return the offset after the last record of a partition. Waits up to READ_SECONDS for a leader.

    Args:
        committed: return the last stable offset instead, which is before an unfinished transaction.

    Raises:
        KafkaException, TimeoutError: the offset cannot be read.
    """
    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    deadline = time.monotonic() + READ_SECONDS
    while True:
        # The client is not kept, since it may answer with an error after a server's restart.
        admin = AdminClient(client_settings(options, name))
        asked = admin.list_offsets({topic_partition: OffsetSpec.latest()}, isolation_level=level, request_timeout=READ_SECONDS)
        try:
            return int(asked[topic_partition].result(2 * READ_SECONDS).offset)
        except (KafkaException, TimeoutError) as error:
            cause = error_of(error)
            if cause is None or cause.name() not in NO_LEADER or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def read_records(options: KafkaOptions, name: str, topic_partition: TopicPartition, start: int, end: int) -> Iterator[Message]:
    """
    Yield the committed records of a partition from `start` up to, but without, `end`.

    Raises:
        KafkaException: the records cannot be read up to the end, which does not mean that there are none.
        StillOpen: there is neither an error nor a further record, so a transaction before the end is unfinished.
    """
    # Each call has a new consumer, because after a second `assign`, `position` may return that of the first.
    with closing(Consumer(reader_settings(options, name))) as consumer:
        low, _ = consumer.get_watermark_offsets(topic_partition, timeout=READ_SECONDS)
        start = max(low, start)
        if start >= end:
            return
        consumer.assign([TopicPartition(topic_partition.topic, topic_partition.partition, start)])
        deadline = time.monotonic() + READ_SECONDS
        problem: KafkaError | None = None
        while consumer.position([topic_partition])[0].offset < end:  # transaction markers take offsets, too
            for record in consumer.consume(MAX_RECORDS, 0) or [consumer.poll(POLL_SECONDS)]:
                if record is None:
                    continue
                if record.error() is not None:
                    problem = record.error()
                elif (record.offset() or 0) < end:
                    deadline = time.monotonic() + READ_SECONDS
                    yield record
            if time.monotonic() > deadline:
                if problem is not None:
                    raise KafkaException(problem)
                raise StillOpen(f"no end within {READ_SECONDS:g} s")
