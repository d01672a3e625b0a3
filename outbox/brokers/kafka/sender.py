"""Opens producers, and produces messages with them: `produce` waits for the delivery reports of all messages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException, Producer

from outbox.brokers.base import Outgoing, SendResult, SendStatus
from outbox.brokers.kafka.client import MESSAGE_TIMEOUT, ConnectionErrors, transactional_settings
from outbox.brokers.kafka.codec import record_headers, record_key
from outbox.brokers.kafka.errors import OF_TOPIC, REFUSED, call_error, describe, error_of, send_result
from outbox.brokers.kafka.options import KafkaOptions
from outbox.errors import LaneBlocked

if TYPE_CHECKING:
    from confluent_kafka import Message

ANY_PARTITION = -1
POLL_SECONDS = 0.05
INIT_SECONDS = 10.0  # includes the time in which Kafka ends an unfinished transaction of the lane's last holder
# Each record has a delivery report after the message timeout. The additional second is for the client's thread to deliver it.
FLUSH_SECONDS = MESSAGE_TIMEOUT.total_seconds() + 1

# Errors that `Producer.produce` raises for one message, after which it still takes others.
TAKES_OTHERS = {*OF_TOPIC, *REFUSED}

BLOCKED = (
    "Kafka has not ended the last transaction of {id!r} within {seconds:g} s. It cannot end a transaction while one of its "
    "partitions has no leader."
)

ACCEPTED = SendResult(SendStatus.ACCEPTED)
NO_REPORT = SendResult(SendStatus.UNSURE, reason=f"Kafka has not reported about the message within {FLUSH_SECONDS:g} s.")


class ProducerLost(Exception):
    """Raised when a producer cannot be used any more: it failed fatally, or another one has taken its transactional id."""


def open_transactional(
    options: KafkaOptions, name: str, transactional_id: str, **settings: object
) -> tuple[Producer, ConnectionErrors]:
    """
    Return a producer that fences out every earlier one with its transactional id, and the errors of its connections.

    Args:
        settings: further settings of the client, which override those of `transactional_settings`.

    Raises:
        BrokerUnavailable: the cluster does not answer.
        LaneBlocked: the last transaction of the id cannot end, since one of its partitions has no leader.
        BrokerMisconfigured: this user may not use the transactional id, or the client takes no such settings.
    """
    action = f"open the transactional id {transactional_id!r}"
    errors = ConnectionErrors()
    try:
        producer = Producer({**transactional_settings(options, name, transactional_id, errors), **settings})
    except KafkaException as error:
        raise call_error(error, action) from error
    try:
        producer.init_transactions(INIT_SECONDS)
    except KafkaException as error:
        cause = error_of(error)
        if cause is not None and cause.code() == KafkaError.CONCURRENT_TRANSACTIONS:
            raise LaneBlocked(BLOCKED.format(id=transactional_id, seconds=INIT_SECONDS)) from error
        raise call_error(error, action, errors.last(producer)) from error
    return producer, errors


def produce(
    producer: Producer,
    messages: Sequence[Outgoing],
    *,
    errors: ConnectionErrors,
    partitions: Mapping[str, int] = MappingProxyType({}),
) -> list[SendResult]:
    """
    Produce messages and return their results.

    Args:
        errors: the errors of the producer's connections.
        partitions: topic -> the partition for all of its messages. By default the key of a message chooses its partition.

    Raises:
        ProducerLost: the producer failed; it is unknown which messages are stored.
    """
    results: list[SendResult | None] = [None] * len(messages)
    deadline = time.monotonic() + FLUSH_SECONDS

    def report(index: int, error: KafkaError | None, _: Message) -> None:
        results[index] = ACCEPTED if error is None else send_result(error, messages[index].topic, errors.last())

    try:
        for index, message in enumerate(messages):
            partition = partitions.get(message.topic, ANY_PARTITION)
            # Reports arrive in this thread, while it polls the producer. So a report cannot be overwritten by this assignment.
            results[index] = _produce_one(producer, message, partial(report, index), deadline, partition)
        producer.flush(max(0.0, deadline - time.monotonic()))
    except (KafkaException, SystemError) as error:  # a callback raises SystemError after a fatal error
        raise ProducerLost(describe(error)) from error
    return [result or NO_REPORT for result in results]


def _produce_one(producer: Producer, message: Outgoing, report: object, deadline: float, partition: int) -> SendResult | None:
    """Pass a message to the producer, and wait while its queue is full. Return a result only if it does not take the message."""
    while True:
        try:
            producer.produce(
                message.topic,
                message.body,
                record_key(message),
                partition,
                headers=record_headers(message),
                on_delivery=report,
            )
            return None
        except BufferError:
            if time.monotonic() > deadline:
                return NO_REPORT
            producer.poll(POLL_SECONDS)
        except KafkaException as error:
            kafka_error = error_of(error)
            if kafka_error is None or kafka_error.code() not in TAKES_OTHERS:
                raise
            return send_result(kafka_error, message.topic)
