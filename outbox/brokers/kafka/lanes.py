"""
The lanes that one broker client has opened. A relay holds a lane alone, and sends its messages in a series of transactions.

The producer of a lane has the lane's transactional id. Each transaction also writes a marker to the lane's partition of the
marker topic; the marker identifies the transaction. A producer is used for one transaction after the other as long as each ends
cleanly; otherwise it is discarded, and its lane is closed. The next producer that opens the lane, in any process, ends the
transaction that the discarded one has left unfinished, and fences that producer out.

A LATE COMMIT. The client's protocol (librdkafka 2.16: EndTxn 1, InitProducerId 4) does not raise the producer's epoch with each
transaction. So if the client sends a commit twice, the second request may reach the broker during the next transaction, and
commit half of that one. The client repeats a request after 0.8 times `RETRY_BACKOFF` at the earliest. So after a commit that took
nearly as long, the lane is closed, because the producer that opens it again has another epoch.

AN OUTAGE of all servers closes the lane as well. When the servers are started again, they may leave a transaction unfinished
though they have confirmed its end (KAFKA-20734). The lane's next transaction would decide about it: its commit would publish
messages that were aborted, its abort would drop messages that were committed. So a lane is only opened if its marker can be read
up to the end of the partition, because this shows that no transaction is unfinished.
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
from outbox.brokers.kafka.topics import describe_topics, find_topic, is_allowed, read_settings
from outbox.errors import BrokerMisconfigured, BrokerUnavailable, LaneBlocked
from outbox.findings import Finding, misconfigured
from outbox.logs import get_logger

logger = get_logger(__name__)

SLOW_COMMIT = RETRY_BACKOFF * 0.75
BLOCKED_SECONDS = 30.0  # the interval at which opening a blocked lane is tried again
RECORD_OVERHEAD = 100  # bytes that Kafka adds to a record and its batch, at most
ONE_BY_ONE = {"batch.num.messages": 1, "linger.ms": 0}

OTHER_REJECTED = SendResult(
    SendStatus.UNAVAILABLE, reason="Another message of its transaction was rejected. This one is sent again."
)
NOT_OPEN = SendResult(SendStatus.UNAVAILABLE, reason="This process has not opened the lane.")


class _Lane(msgspec.Struct):
    """
    An open lane.

    Args:
        errors: the errors of the producer's connections.
        is_one_by_one: whether the producer sends each record in a separate batch, to find out which one Kafka refuses.
        limits: topic -> the size of the largest record that the topic takes, in bytes. None: unknown, since this user may not ask
            for it, or since records are compressed.
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
        # Transactional id that could not be opened -> when this is tried again (`monotonic`), and the error.
        self._blocked: dict[str, tuple[float, LaneBlocked]] = {}
        self._one_by_one: set[int] = set()  # lanes whose next transaction sends records one by one

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
        """Return the marker of a lane without fencing out its holder; see `TransactionalSends.read_lane_marker`."""
        topic = marker_topic(source)
        description = find_topic(self._options, self._name, topic, hint=ALLOW)
        if description is None or len(description.partitions) <= lane:
            return None
        return read_marker(self._options, self._name, topic, lane, is_fenced=False)

    def problems(self, source: str) -> list[Finding]:
        """
        Return problems that keep this user from sending transactions of an outbox. Opens a transactional id that no lane uses.

        Raises:
            BrokerUnavailable: the cluster does not answer.
        """
        try:
            self._fence(source, "check")
        except BrokerMisconfigured as error:
            return [misconfigured(error.message, error.hint)]
        return []

    def is_open(self, lane: int) -> bool:
        """Return whether a transaction can be sent in a lane: it is open here, and was never without a reachable server since."""
        open_lane = self._lanes.get((os.getpid(), lane))
        if open_lane is not None and open_lane.errors.was_cut_off(open_lane.producer):
            del self._lanes[os.getpid(), lane]
            return False
        return open_lane is not None

    def close(self) -> None:
        """Discard all producers. An unfinished transaction ends with the lane's next producer, or by Kafka's timeout."""
        self._lanes.clear()

    def send(self, lane: int, messages: Sequence[Outgoing], marker: str) -> list[SendResult]:
        """Send messages and a marker in one transaction; see `TransactionalSends.send_transaction`."""
        open_lane = self._lanes.pop((os.getpid(), lane), None)  # put back only after a clean end
        if open_lane is None:
            return [NOT_OPEN] * len(messages)
        try:
            if rejected := self._reject(open_lane, messages):
                self._lanes[os.getpid(), lane] = open_lane
                return aborted_results(messages, rejected)
            open_lane.producer.begin_transaction()
            record = Outgoing("", open_lane.marker_topic, marker.encode(), str(lane))
            partitions = {open_lane.marker_topic: lane}
            *results, marker_result = produce(
                open_lane.producer, [*messages, record], errors=open_lane.errors, partitions=partitions
            )
        except (KafkaException, ProducerLost) as error:
            return self._results_of_uncommitted(lane, messages, describe(error))
        if any(result.status is not SendStatus.ACCEPTED for result in results):
            return self._results_of_rejected(lane, open_lane, messages, results)
        if marker_result.status is not SendStatus.ACCEPTED:
            return self._results_of_uncommitted(
                lane, messages, _explain(_transaction_error(open_lane.producer)) or marker_result.reason
            )
        began = time.monotonic()
        if problem := _commit(open_lane.producer):
            return [SendResult(SendStatus.UNSURE, reason=f"Kafka did not confirm the transaction ({problem}).")] * len(messages)
        self._one_by_one.discard(lane)
        if time.monotonic() - began < SLOW_COMMIT.total_seconds() and not open_lane.is_one_by_one:
            self._lanes[os.getpid(), lane] = open_lane
        return results

    def _fence(self, source: str, lane: int | str, **settings: object) -> tuple[Producer, ConnectionErrors]:
        """Return a producer with a lane's transactional id, which fences out earlier ones; see `open_transactional`."""
        transactional_id = f"outbox.{source.rpartition(':')[2]}.{lane}"
        retry_at, blocked = self._blocked.get(transactional_id, (0.0, None))
        if blocked is not None and time.monotonic() < retry_at:
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
            lane.limits[topic] = self._max_record_bytes(lane, topic)
        for index, message in enumerate(messages):
            limit = lane.limits[message.topic]
            # The first check is quick, since it does not count each header.
            if limit is None or len(message.body) + FOR_HEADERS + RECORD_OVERHEAD <= limit:
                continue
            if record_size(message) + RECORD_OVERHEAD > limit:
                rejected[index] = SendResult(
                    SendStatus.REFUSED,
                    reason=f"The message has about {record_size(message)} bytes with key and headers; topic {message.topic!r} "
                    f"takes {limit} (max.message.bytes).",
                )
        return rejected

    def _max_record_bytes(self, lane: _Lane, topic: str) -> int | None:
        """Return the size of the largest record that a topic takes, in bytes; None if sizes cannot be compared."""
        if self._options.compresses:
            return None
        metadata = lane.producer.list_topics(topic, timeout=ANSWER_SECONDS).topics[topic]
        if metadata.error is not None and not metadata.partitions:
            return None  # the delivery reports will explain the error
        limit = read_settings(self._options, self._name, [topic])[topic].get("max.message.bytes")
        return int(limit) if limit is not None else None

    def _results_of_rejected(
        self, lane: int, open_lane: _Lane, messages: Sequence[Outgoing], results: Sequence[SendResult]
    ) -> list[SendResult]:
        """Return the results of a transaction in which the delivery of some messages failed, so that it is not committed."""
        too_large = [n for n, result in enumerate(results) if result.status is SendStatus.REFUSED]
        if too_large and not open_lane.is_one_by_one:  # Kafka refuses a batch of records as a whole
            self._one_by_one.add(lane)
            again = SendResult(SendStatus.UNAVAILABLE, reason=f"It is sent again, one by one: {results[too_large[0]].reason}")
            return [again] * len(results)
        blamed = {
            n: result for n, result in enumerate(results) if result.status in (SendStatus.REFUSED, SendStatus.MISCONFIGURED)
        }
        cause = None if blamed else _transaction_error(open_lane.producer)
        if cause is not None and cause.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            denied = self._unwritable_topics({message.topic for message in messages})
            blamed = {n: send_result(cause, message.topic) for n, message in enumerate(messages) if message.topic in denied}
        if blamed:
            return aborted_results(results, blamed)
        reason = next(result.reason for result in results if result.status is not SendStatus.ACCEPTED)
        return self._results_of_uncommitted(lane, results, _explain(cause) or reason)

    def _unwritable_topics(self, topics: Collection[str]) -> set[str]:
        """Return the topics that this user may not write to, since the error of a transaction does not name them."""
        try:
            descriptions = describe_topics(self._options, self._name, topics)
        except BrokerUnavailable:
            return set()
        return {
            topic
            for topic, description in descriptions.items()
            if isinstance(description, KafkaError) or not is_allowed(description, AclOperation.WRITE)
        }

    def _results_of_uncommitted(self, lane: int, messages: Sequence[object], reason: str) -> list[SendResult]:
        """Return the results of a transaction that was not committed."""
        logger.warning("The transaction of lane %s was not committed: %s", lane, reason)
        return [SendResult(SendStatus.UNAVAILABLE, reason=f"The transaction was not committed: {reason}")] * len(messages)


def aborted_results(messages: Sequence[object], rejected: Mapping[int, SendResult]) -> list[SendResult]:
    """Return the results of a transaction that was not committed, because some of its messages (by index) were rejected."""
    return [rejected.get(index, OTHER_REJECTED) for index in range(len(messages))]


def _transaction_error(producer: Producer) -> KafkaError | None:
    """
    Return the error of the current transaction; None if it has not failed. Delivery reports do not name it (`_PURGE_QUEUE`).

    A second `begin_transaction` always fails: with the error of the transaction if it has failed, otherwise with `_STATE`.
    `commit_transaction` would raise that error as well, but would commit a transaction that has not failed.
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
    """Commit the current transaction. Return "" if Kafka confirms this, otherwise the error; the marker then tells the result."""
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
