"""Reads partitions up to their end, without a consumer group."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from confluent_kafka import Consumer, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from outbox.brokers.kafka.client import client_settings, reader_settings
from outbox.brokers.kafka.errors import call_error, error_of
from outbox.brokers.kafka.options import KafkaOptions

if TYPE_CHECKING:
    from confluent_kafka import Message

READ_SECONDS = 10.0
NO_LEADER = {"NOT_LEADER_FOR_PARTITION", "LEADER_NOT_AVAILABLE", "FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH"}


def read_end(options: KafkaOptions, name: str, place: TopicPartition, *, committed: bool = False) -> int:
    """
    Return the offset after the last record of a partition; waits while it has no leader.

    Args:
        committed: the end for readers of committed records, which is before an open transaction.

    Raises:
        KafkaException, TimeoutError: it cannot be read.
    """
    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    deadline = time.monotonic() + READ_SECONDS
    while True:
        admin = AdminClient(client_settings(options, name))  # a new one: one that outlived a restart may answer with an error
        asked = admin.list_offsets({place: OffsetSpec.latest()}, isolation_level=level, request_timeout=READ_SECONDS)
        try:
            return int(asked[place].result(2 * READ_SECONDS).offset)
        except (KafkaException, TimeoutError) as error:
            cause = error_of(error)
            if cause is None or cause.name() not in NO_LEADER or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def read_records(options: KafkaOptions, name: str, place: TopicPartition, start: int, end: int) -> Iterator[Message]:
    """
    Yield the committed records of a partition from an offset to another one.

    Raises:
        KafkaException, BrokerUnavailable: they cannot be read to the end. That is never the same as none.
    """
    with closing(
        Consumer(reader_settings(options, name))
    ) as consumer:  # a new one: `position` may be that of an earlier `assign`
        low, _ = consumer.get_watermark_offsets(place, timeout=READ_SECONDS)
        start = max(low, start)
        if start >= end:
            return
        consumer.assign([TopicPartition(place.topic, place.partition, start)])
        deadline = time.monotonic() + READ_SECONDS
        problem: Any = None
        while consumer.position([place])[0].offset < end:  # the ends of transactions move it without a message
            for record in consumer.consume(500, 0) or [consumer.poll(0.05)]:
                if record is None:
                    continue
                if record.error() is not None:
                    problem = record.error()
                elif (record.offset() or 0) < end:
                    deadline = time.monotonic() + READ_SECONDS
                    yield record
            if time.monotonic() > deadline:
                cause = KafkaException(problem) if problem is not None else TimeoutError(f"no end within {READ_SECONDS:g} s")
                raise call_error(cause, f"read the topic {place.topic!r} up to its end")
