"""
The lanes of one broker client: transactions of messages and a marker, by a producer whose transactional id is the lane's.

A producer serves transactions as long as each ends cleanly, and is thrown away after anything else. The next one that opens the
lane, here or elsewhere, ends what it has left open, and fences it out.

A LATE COMMIT. The client's protocol (librdkafka 2.16: EndTxn 1, InitProducerId 4) does not raise the epoch with each transaction:
a commit that the client has sent twice may reach the broker in the next transaction, and commit half of it. The client repeats a
request after 0.8 times `RETRY_BACKOFF` at the earliest. So after a commit that took nearly as long, the lane is closed: the next
producer has another epoch.

AN OUTAGE of all servers closes the lane as well. When they are started again, they may leave a transaction open that they have
confirmed (KAFKA-20734). The next one of the lane would decide about it: a commit shows what was aborted, an abort drops what was
committed. A lane is only opened where its marker can be read to the end, that is, where no transaction is open.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence

import msgspec
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AclOperation

from outbox.brokers.base import Outgoing, SendResult, SendStatus
from outbox.brokers.kafka.client import (
    ANSWER_SECONDS,
    RETRY_BACKOFF,
    ConnectionErrors,
)
from outbox.brokers.kafka.codec import record_size
from outbox.brokers.kafka.errors import HINTS, describe, error_of, send_result
from outbox.brokers.kafka.marker import ALLOW, ensure_topic, marker_topic, read_marker
from outbox.brokers.kafka.options import FOR_HEADERS, KafkaOptions
from outbox.brokers.kafka.sender import ProducerLost, open_transactional, produce
from outbox.brokers.kafka.topics import describe_topics, find_topic, may, read_settings
from outbox.errors import BrokerMisconfigured, BrokerUnavailable, LaneBlocked
from outbox.findings import Finding, misconfigured
from outbox.logs import get_logger

logger = get_logger(__name__)

SLOW_COMMIT = RETRY_BACKOFF * 0.75
BLOCKED_SECONDS = 30.0  # after which a blocked lane is tried again
RECORD_OVERHEAD = 100  # bytes that Kafka adds to a record and its batch, at most
ONE_BY_ONE = {"batch.num.messages": 1, "linger.ms": 0}

OTHER_REJECTED = SendResult(SendStatus.UNAVAILABLE, reason="Another message of its transaction was rejected. It is sent again.")
NOT_OPEN = SendResult(SendStatus.UNAVAILABLE, reason="The lane is not open here.")


class _Lane(msgspec.Struct):
    """
    An open lane.

    Args:
        errors: those of the producer's connections.
        limits: topic -> the largest record that it takes, in bytes. None: unknown, since this user may not ask, or since records
            are compressed.
    """

    producer: Producer
    errors: ConnectionErrors
    marker_topic: str
    is_one_by_one: bool
    limits: dict[str, int | None] = msgspec.field(default_factory=dict)


class KafkaLanes:
    """The lanes that one broker client has opened."""

    def __init__(self, options: KafkaOptions, name: str) -> None:
        self._options = options
        self._name = name
        self._lanes: dict[tuple[int, int], _Lane] = {}  # process and lane: a producer does not work in a forked process
        self._blocked: dict[str, tuple[float, LaneBlocked]] = {}  # transactional id -> until when it is not asked for again
        self._one_by_one: set[int] = set()  # lanes whose next transaction finds out which message is too large

    def open(self, source: str, lane: int) -> str | None:
        """Take a lane over and return its marker; see `TransactionalSends.open_lane`."""
        self._lanes.pop((os.getpid(), lane), None)
        topic = marker_topic(source)
        ensure_topic(self._options, self._name, topic, lane)
        is_one_by_one = lane in self._one_by_one
        producer, errors = self._fence(source, lane, **(ONE_BY_ONE if is_one_by_one else {}))
        marker = read_marker(self._options, self._name, topic, lane)
        errors.last(producer)
        errors.forget()
        self._lanes[os.getpid(), lane] = _Lane(producer, errors, topic, is_one_by_one)
        return marker

    def look_at(self, source: str, lane: int) -> str | None:
        """Return the marker of a lane and fence nobody out; see `TransactionalSends.look_at_lane`."""
        topic = marker_topic(source)
        description = find_topic(self._options, self._name, topic, hint=ALLOW)
        if description is None or len(description.partitions) <= lane:
            return None
        return read_marker(self._options, self._name, topic, lane, is_fenced=False)

    def problems(self, source: str) -> list[Finding]:
        """
        Return what keeps this user from sending transactions of an outbox, asked with a transactional id that no lane has.

        Raises:
            BrokerUnavailable: the cluster does not answer.
        """
        try:
            self._fence(source, "check")
        except BrokerMisconfigured as error:
            return [misconfigured(error.message, error.hint)]
        return []

    def is_open(self, lane: int) -> bool:
        """Return whether a transaction can be sent in a lane, and the cluster was never away since it was opened."""
        held = self._lanes.get((os.getpid(), lane))
        if held is not None and held.errors.was_cut_off(held.producer):
            del self._lanes[os.getpid(), lane]
            return False
        return held is not None

    def close(self) -> None:
        """Throw all producers away. An open transaction is ended by the next one that opens its lane, or by its time-out."""
        self._lanes.clear()

    def send(self, lane: int, messages: Sequence[Outgoing], marker: str) -> list[SendResult]:
        """Send messages and a marker in one transaction; see `TransactionalSends.send_transaction`."""
        held = self._lanes.pop((os.getpid(), lane), None)  # back only after a clean end
        if held is None:
            return [NOT_OPEN] * len(messages)
        try:
            if rejected := self._reject(held, messages):
                self._lanes[os.getpid(), lane] = held
                return undone(messages, rejected)
            held.producer.begin_transaction()
            record = Outgoing("", held.marker_topic, marker.encode(), str(lane))
            to_lane = {held.marker_topic: lane}
            *results, noted = produce(held.producer, [*messages, record], errors=held.errors, partitions=to_lane)
        except (KafkaException, ProducerLost) as error:
            return self._failed(lane, messages, describe(error))
        if any(result.status is not SendStatus.ACCEPTED for result in results):
            return self._rejected(lane, held, messages, results)
        if noted.status is not SendStatus.ACCEPTED:
            return self._failed(lane, messages, _explain(_failure(held.producer)) or noted.reason)
        began = time.monotonic()
        if problem := _commit(held.producer):
            return [SendResult(SendStatus.UNSURE, reason=f"Kafka did not confirm the transaction ({problem}).")] * len(messages)
        self._one_by_one.discard(lane)
        if time.monotonic() - began < SLOW_COMMIT.total_seconds() and not held.is_one_by_one:
            self._lanes[os.getpid(), lane] = held
        return results

    def _fence(self, source: str, lane: int | str, **settings: object) -> tuple[Producer, ConnectionErrors]:
        transactional_id = f"outbox.{source.rpartition(':')[2]}.{lane}"
        until, blocked = self._blocked.get(transactional_id, (0.0, None))
        if blocked is not None and time.monotonic() < until:
            raise blocked
        try:
            return open_transactional(self._options, self._name, transactional_id, **settings)
        except LaneBlocked as error:
            self._blocked[transactional_id] = (time.monotonic() + BLOCKED_SECONDS, error)
            raise

    def _reject(self, lane: _Lane, messages: Sequence[Outgoing]) -> dict[int, SendResult]:
        """Return the results of messages that are too large for their topics."""
        rejected = {}
        for topic in {message.topic for message in messages} - set(lane.limits):
            lane.limits[topic] = self._look_up(lane, topic)
        for index, message in enumerate(messages):
            limit = lane.limits[message.topic]
            if limit is None or len(message.body) + FOR_HEADERS + RECORD_OVERHEAD <= limit:  # without counting each header
                continue
            if record_size(message) + RECORD_OVERHEAD > limit:
                rejected[index] = SendResult(
                    SendStatus.REFUSED,
                    reason=f"The message has about {record_size(message)} bytes with key and headers; topic {message.topic!r} "
                    f"takes {limit} (max.message.bytes).",
                )
        return rejected

    def _look_up(self, lane: _Lane, topic: str) -> int | None:
        """Return the largest record that a topic takes, in bytes; None where it cannot be compared."""
        if self._options.compresses:
            return None
        metadata = lane.producer.list_topics(topic, timeout=ANSWER_SECONDS).topics[topic]
        if metadata.error is not None and not metadata.partitions:
            return None  # the delivery report says why
        limit = read_settings(self._options, self._name, [topic])[topic].get("max.message.bytes")
        return int(limit) if limit is not None else None

    def _rejected(self, lane: int, found: _Lane, messages: Sequence[Outgoing], results: Sequence[SendResult]) -> list[SendResult]:
        """Return the results of a transaction in which the delivery of some messages failed."""
        too_large = [n for n, result in enumerate(results) if result.status is SendStatus.REFUSED]
        if too_large and not found.is_one_by_one:  # Kafka refuses a batch of records as a whole
            self._one_by_one.add(lane)
            again = SendResult(SendStatus.UNAVAILABLE, reason=f"Sent again one by one: {results[too_large[0]].reason}")
            return [again] * len(results)
        blamed = {
            n: result for n, result in enumerate(results) if result.status in (SendStatus.REFUSED, SendStatus.MISCONFIGURED)
        }
        cause = None if blamed else _failure(found.producer)
        if cause is not None and cause.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            denied = self._denied({message.topic for message in messages})
            blamed = {n: send_result(cause, message.topic) for n, message in enumerate(messages) if message.topic in denied}
        if blamed:
            return undone(results, blamed)
        reason = next(result.reason for result in results if result.status is not SendStatus.ACCEPTED)
        return self._failed(lane, results, _explain(cause) or reason)

    def _denied(self, topics: Collection[str]) -> set[str]:
        """Return the topics that this user may not write to; the error of a transaction does not name them."""
        try:
            descriptions = describe_topics(self._options, self._name, topics)
        except BrokerUnavailable:
            return set()
        return {
            topic
            for topic, description in descriptions.items()
            if isinstance(description, KafkaError) or not may(description, AclOperation.WRITE)
        }

    def _failed(self, lane: int, messages: Sequence[object], reason: str) -> list[SendResult]:
        """Return the results of a transaction that was not committed."""
        logger.warning("The transaction of lane %s was not committed: %s", lane, reason)
        return [SendResult(SendStatus.UNAVAILABLE, reason=f"The transaction was not committed: {reason}")] * len(messages)


def undone(messages: Sequence[object], rejected: Mapping[int, SendResult]) -> list[SendResult]:
    """Return the results of a transaction that was not committed, since some of its messages (by index) were rejected."""
    return [rejected.get(index, OTHER_REJECTED) for index in range(len(messages))]


def _failure(producer: Producer) -> KafkaError | None:
    """
    Return why the open transaction has failed, which reports do not say (`_PURGE_QUEUE`); None where it has not.

    The client answers a wrong call with the error of a transaction that has failed. `commit_transaction` says it, too, but would
    commit one that has not.
    """
    try:
        producer.begin_transaction()
    except KafkaException as raised:
        error = error_of(raised)
        return None if error is None or error.code() == KafkaError._STATE else error
    return None


def _explain(error: KafkaError | None) -> str:
    return "" if error is None else f"{describe(error)}. {HINTS.get(error.code(), '')}".rstrip()


def _commit(producer: Producer) -> str:
    """Commit the open transaction; return "" if that is confirmed, else why not: then only the marker tells."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            producer.commit_transaction(max(0.1, deadline - time.monotonic()))
            return ""
        except KafkaException as raised:
            error = error_of(raised)
            if error is None or not error.retriable() or time.monotonic() > deadline:
                return describe(raised)
        except SystemError as raised:
            return describe(raised)
