"""
A member of a consumer group.

The group's offset in a partition is committed after a message was acknowledged, so whatever happens to a member, the messages
that it had not acknowledged are delivered again. Fetched records are kept in the member's partitions (`partition.py`).

DELIVERY COUNTS. Kafka does not count deliveries, but a message that killed its process must not be taken for a new one. So before
records of a partition are handed out, the partition is marked as *in use*: a bound is committed in the offset's metadata. The
bound is that offset plus the largest number of messages that a `receive` has asked for until then. No record at or above the
bound is handed out, and the next holder of the partition takes all records below the bound for redelivered ones. A member that
gives the partition back lowers the bound to the records that it really handed out, and a member that finds the partition idle
removes the bound. The metadata also names the owner of the group (source and project).

THREADS. `_polling` is held during a poll, and rebalances happen within one. `_lock` is held by bookkeeping and commits. A thread
that needs both takes `_polling` first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from outbox.brokers.base import Delivery
from outbox.brokers.kafka.client import ANSWER_SECONDS, MAX_POLL_INTERVAL, member_settings
from outbox.brokers.kafka.codec import to_delivery
from outbox.brokers.kafka.errors import MISCONFIGURED, call_error, describe, error_of
from outbox.brokers.kafka.groups import read_offsets, require_access
from outbox.brokers.kafka.offset_notes import OffsetNote, committed_notes, require_owner
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.kafka.partition import HeldPartition
from outbox.brokers.kafka.topics import describe_topics, existing_topics, find_topic
from outbox.brokers.owners import NO_OWNER, GroupOwner, OwnedByAnother
from outbox.errors import BrokerMisconfigured, BrokerUnavailable
from outbox.logs import get_logger, log_fields
from outbox.message import TopicSpec, TopicType

if TYPE_CHECKING:
    from confluent_kafka import Message
    from confluent_kafka.admin import TopicDescription

logger = get_logger(__name__)

_batch_numbers = count(1)  # part of the receipts of a batch of deliveries, so that no receipt is used twice

POLL_SECONDS = 0.1  # the maximum duration of a poll, and so the time within which `interrupt` and `close` end a `receive`
REFUSED_SECONDS = 10.0  # the interval at which the member tries again to subscribe to a refused topic
TOPICS_SECONDS = 10.0  # the interval of queries for topics that were deleted and created again, and for unfinished transactions
UNFINISHED_SECONDS = 60.0  # a transaction that stays unfinished for longer is reported
IDLE_SECONDS = 5.0  # a partition without new or acknowledged records for this time is no longer in use
# `close` waits up to this time for a join that has begun. Otherwise the group would count the member in, and wait for it until
# its session times out.
JOIN_SECONDS = 1.0
UNANSWERED_SECONDS = 5.0  # after this time without a record, the member asks whether any broker is reachable

# Errors of a commit which say that the group no longer has this member, or not in the current generation.
LOST = {"ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID", "STALE_MEMBER_EPOCH", "FENCED_INSTANCE_ID", "FENCED_MEMBER_EPOCH"}
UNFINISHED = (
    "A transaction has been open in partition {partition} of topic {topic!r} since {since:%Y-%m-%d %H:%M:%S} UTC or before, at "
    "offset {offset}: none of the {count} offsets from there on is delivered to read_committed consumers. Have its producer end "
    "it, or find it (find-hanging) and end it (abort) with kafka-transactions.sh."
)
NO_TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAA"  # a UUID of zeros in Kafka's Base64
ALLOW = "Allow this user Read on the topic."
REBALANCING = {"REBALANCE_IN_PROGRESS"}


class GroupMember:
    """
    One member of a consumer group. Each member has its own `Consumer` of the Kafka client.

    Args:
        topics: all topics of the broker by name.
        clock: seconds since 1970, by which deliveries expire.
    """

    def __init__(
        self,
        options: KafkaOptions,
        name: str,
        group: str,
        topics: Mapping[str, TopicSpec],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.group = group
        self.owner: GroupOwner = NO_OWNER
        self.known_topics: frozenset[str] = frozenset()  # topics of messages in the group's inbox
        self.refusals: dict[str, str] = {}
        self._options = options
        self._name = name
        self._topics = topics
        self._clock = clock
        self._consumer = Consumer(member_settings(options, name, group))
        self._subscribed: set[str] = set()
        self._ask_again_at: dict[str, float] = {}  # refused topic -> the time of the next attempt
        self.unfinished: dict[str, str] = {}  # topic -> report about its unfinished transaction
        # Topic-partition -> the last stable offset, where an unfinished transaction begins, and when it was first seen there.
        self._open_transactions: dict[TopicPartition, tuple[int, float]] = {}
        self._topic_ids: dict[str, str] = {}  # topic -> its id when Kafka was last asked
        self._topics_checked_at = time.monotonic()
        self._topics_thread = threading.Thread()
        self._new_partitions: set[tuple[str, int]] = set()  # of topics that are new to the group: they need a start offset
        # The assigned partitions, in the order in which their records are handed out.
        self._partitions: dict[tuple[str, int], HeldPartition] = {}
        self._largest_batch = 1  # the largest `limit` of a receive until now
        self._polling = threading.Lock()
        self._lock = threading.RLock()
        # When the last poll began, and when a record or another answer of a broker last arrived; both by `monotonic`.
        self._polled_at = self._answered_at = time.monotonic()
        self._is_interrupted = self._is_closed = self._has_joined = False
        self.has_failed = False  # whether the client has failed for good: it fetches nothing more, and reports this once

    def receive(self, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta) -> list[Delivery]:
        """
        Receive messages, and wait for the first one.

        Raises:
            BrokerUnavailable: no broker answers.
            BrokerMisconfigured: this user may not read the topics, or not for the group.
        """
        with self._polling:
            self._require_not_closed()
            self._subscribe(topics)
        with self._lock:
            self._largest_batch = max(self._largest_batch, limit)
            self._check_topics_at_intervals()
        deadline = time.monotonic() + wait.total_seconds()
        seconds = 0.0
        while True:
            self._fetch(topics, limit, seconds)
            if deliveries := self._hand_out(topics, limit, invisible_for.total_seconds()):
                return deliveries
            seconds = min(deadline - time.monotonic(), POLL_SECONDS)
            if seconds <= 0 or self._is_interrupted:
                return []
            self._require_answers()

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """
        Hold deliveries for that time from now, and with them all others of their partitions.

        None in place of a delivery that is no longer held.
        """
        self._keep_alive()
        with self._lock:
            renewed: list[Delivery | None] = []
            for delivery in deliveries:
                partition, _ = self._find_held(delivery)
                if partition is not None:
                    partition.held_until = self._clock() + invisible_for.total_seconds()
                renewed.append(delivery if partition is not None else None)
            return renewed

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Make deliveries available again. This member hands them out again, since it keeps their partitions."""
        with self._lock:
            for delivery in deliveries:
                partition, offset = self._find_held(delivery)
                if partition is not None:
                    del partition.held[offset]

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Acknowledge messages and commit the offsets. False if a delivery is no longer held, or its partition may be lost."""
        now = time.monotonic()
        with self._lock:
            partitions: list[HeldPartition | None] = []
            for delivery in deliveries:
                partition, offset = self._find_held(delivery)
                if partition is not None:
                    del partition.held[offset], partition.records[offset]
                    partition.changed_at = now
                partitions.append(partition)
            lost = self._commit({partition for partition in partitions if partition is not None})
            return [partition is not None and partition not in lost for partition in partitions]

    def interrupt(self) -> None:
        """End the wait of the current `receive` and of all later ones. Any thread may call this."""
        self._is_interrupted = True

    def close(self) -> None:
        """Leave the group; acknowledged messages are committed. A second call does nothing."""
        self._is_interrupted = True
        with self._polling:
            if self._is_closed:
                return
            self._is_closed = True
            if self._topics_thread.is_alive():
                self._topics_thread.join(ANSWER_SECONDS)
            try:
                deadline = time.monotonic() + JOIN_SECONDS
                while self._subscribed and not self._has_joined and time.monotonic() < deadline:
                    self._consumer.poll(0.05)
                # A revocation during `Consumer.close()` can hang forever: it waits, holding the GIL, for a client thread that has
                # already ended. So the partitions are revoked before, by `unsubscribe` and polls.
                self._consumer.unsubscribe()
                deadline = time.monotonic() + ANSWER_SECONDS
                while self._partitions and time.monotonic() < deadline:
                    self._consumer.poll(0.05)
                self._consumer.close()
            except (KafkaException, RuntimeError) as error:
                logger.info("Group %s: this member could not leave the group: %s", self.group, describe(error))

    def _subscribe(self, topics: Collection[str]) -> None:
        """Subscribe to the topics that are not subscribed to yet, except recently refused ones."""
        now = time.monotonic()
        new = [topic for topic in topics if topic not in self._subscribed and self._ask_again_at.get(topic, 0.0) <= now]
        try:
            for topic in new:
                try:
                    self._prepare_topic(topic)
                except (BrokerMisconfigured, OwnedByAnother) as error:
                    self._refuse(topic, str(error))
                else:
                    self.refusals.pop(topic, None)
                    self._subscribed.add(topic)
        finally:  # also if a later topic raised BrokerUnavailable
            if new and self._subscribed:
                self._consumer.subscribe(
                    list(self._subscribed), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
                )

    def _prepare_topic(self, topic: str) -> None:
        """
        Check that the group may read a topic, and remember the partitions for which a start offset must be set.

        Raises:
            BrokerUnavailable, BrokerMisconfigured
            OwnedByAnother: the group has its inbox in another outbox.
        """
        description = find_topic(self._options, self._name, topic, hint=ALLOW)
        if description is None:
            raise call_error(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)), f"look the topic {topic!r} up")
        self._topic_ids[topic] = _id_of(description)
        require_access(self._options, self._name, self.group)
        topic_partitions = [TopicPartition(topic, number) for number in range(len(description.partitions))]
        notes = committed_notes(self._consumer, topic_partitions)
        require_owner(self.group, notes, self.owner)
        # Missing offsets alone do not show that the group is new to the topic, since Kafka deletes the offsets of idle groups.
        if all(topic_partition.offset < 0 for topic_partition in notes) and topic not in self.known_topics:
            # Partitions that are added later are not in this set, so they are read from their first message, whatever START is.
            self._new_partitions |= {(topic_partition.topic, topic_partition.partition) for topic_partition in topic_partitions}

    def _check_topics_at_intervals(self) -> None:
        """Start `_check_topics`, at most every TOPICS_SECONDS, in a thread, since Kafka's answers may take seconds."""
        if time.monotonic() >= self._topics_checked_at + TOPICS_SECONDS and not self._topics_thread.is_alive():
            self._topics_checked_at = time.monotonic()
            self._topics_thread = threading.Thread(target=self._check_topics, name=f"Topics of group {self.group}", daemon=True)
            self._topics_thread.start()

    def _check_topics(self) -> None:
        """Update the ids of the topics, and the reports about unfinished transactions."""
        with suppress(BrokerUnavailable):  # the earlier answers stay valid
            existing = existing_topics(describe_topics(self._options, self._name, set(self._subscribed)))
            self._topic_ids |= {topic: _id_of(description) for topic, description in existing.items()}
            self._find_open_transactions()

    def _find_open_transactions(self) -> None:
        """
        Report transactions that stay unfinished, in partitions without fetched records.

        There is an unfinished transaction if the last stable offset is before the end of the partition. As long as that offset
        does not move, it is the same transaction.
        """
        with self._lock:
            topic_partitions = [TopicPartition(*key) for key, partition in self._partitions.items() if not partition.records]
        latest, now = OffsetSpec.latest(), self._clock()
        stable = read_offsets(self._options, self._name, topic_partitions, latest)
        ends = read_offsets(self._options, self._name, topic_partitions, latest, IsolationLevel.READ_UNCOMMITTED)
        before, self._open_transactions = self._open_transactions, {}
        unfinished = {}
        for topic_partition, offset in stable.items():
            if offset < ends[topic_partition]:
                known, since = before.get(topic_partition, (offset, now))
                self._open_transactions[topic_partition] = offset, since if known == offset else now
                if known == offset and now - since >= UNFINISHED_SECONDS:
                    unfinished[topic_partition.topic] = UNFINISHED.format(
                        partition=topic_partition.partition,
                        topic=topic_partition.topic,
                        since=datetime.fromtimestamp(since, UTC),
                        offset=offset,
                        count=ends[topic_partition] - offset,
                    )
        self.unfinished = unfinished

    def _restart(self, partition: HeldPartition, topic_id: str) -> None:
        """
        Read a partition from its start, since its topic was deleted and created again.

        The committed offset belongs to the old topic, so it is not used even if the new topic has a record at this offset.
        """
        logger.warning(
            "Topic %r was deleted and created again: group %r reads partition %s from its first message.",
            partition.topic,
            self.group,
            partition.number,
            extra=log_fields(group=self.group, topic=partition.topic),
        )
        topic_partition = TopicPartition(partition.topic, partition.number)
        try:
            topic_partition.offset = self._consumer.get_watermark_offsets(topic_partition, timeout=ANSWER_SECONDS)[0]
            self._consumer.seek(topic_partition)
        except KafkaException as error:
            raise call_error(error, f"go to the start of topic {partition.topic!r}", hint=ALLOW) from error
        partition.restart_at(topic_partition.offset)
        partition.topic_id = topic_id

    def _refuse(self, topic: str, reason: str) -> None:
        """Record, and log once, why a topic cannot be received from."""
        if self.refusals.get(topic) != reason:
            logger.error(
                "Group %r cannot receive from topic %r as configured: %s",
                self.group,
                topic,
                reason,
                extra=log_fields(group=self.group, topic=topic),
            )
        self.refusals[topic] = reason
        self._ask_again_at[topic] = time.monotonic() + REFUSED_SECONDS

    def _fetch(self, topics: Collection[str], limit: int, seconds: float) -> None:
        """Fetch records until the limit of records wait here to be handed out. Wait up to `seconds` for the first one."""
        with self._polling:
            self._require_not_closed()
            self._polled_at = time.monotonic()
            with self._lock:
                self._pause_and_resume(topics)
                partitions = [partition for partition in self._partitions.values() if partition.topic in topics]
                waiting = sum(len(partition.records) - len(partition.held) for partition in partitions)
            records: list[Message] = []
            if seconds and not self._subscribed:  # all topics are refused
                time.sleep(seconds)
            elif seconds and (first := self._consumer.poll(seconds)) is not None:
                records.append(first)
            if records or not seconds:
                records += self._consumer.consume(max(1, limit - waiting - len(records)), 0)
            with self._lock:  # `_polling` is still held, so that no rebalance takes a partition away before its records are added
                problems = [problem for record in records if (problem := self._add(record)) is not None]
                self._read_committed_offsets()
                for partition in self._partitions.values():
                    current = self._topic_ids.get(partition.topic, "")
                    if current and partition.topic_id not in ("", current):
                        self._restart(partition, current)
                uncommitted = [partition for partition in self._partitions.values() if (partition.committed or 0) < 0]
                self._commit([partition for partition in uncommitted if not partition.records])
                if seconds and not records:
                    self._commit_idle()
            if problems:  # raised only now that all records are in their partitions, since none is fetched a second time
                raise problems[0]

    def _add(self, record: Message) -> BrokerUnavailable | None:
        """Add a record to its partition. If the record is an error, return the exception to raise, if any."""
        if (error := record.error()) is not None:
            return self._handle_error(record, error)
        self._answered_at = time.monotonic()
        partition = self._partitions.get((record.topic() or "", record.partition() or 0))
        if partition is not None:  # otherwise the partition was revoked after the record was fetched
            self.refusals.pop(partition.topic, None)
            partition.add(record, self._answered_at)
        return None

    def _handle_error(self, record: Message, error: KafkaError) -> BrokerUnavailable | None:
        """Log an error that the client reports as a record, or refuse its topic. Return the exception if it names no topic."""
        if error.code() == KafkaError._FATAL:  # the text has the cause; `fatal()` is False for the error of a record
            self.has_failed = True
        elif error.code() not in MISCONFIGURED:
            logger.info("Group %s: %s", self.group, describe(error))
            return None
        problem = call_error(KafkaException(error), f"read for group {self.group!r}", hint=ALLOW)
        topic = record.topic() or ""
        if topic in self._subscribed:
            self._refuse(topic, str(problem))
            return None
        return problem

    def _pause_and_resume(self, topics: Collection[str]) -> None:
        """Pause the partitions of other topics, and partitions with a full batch of records; resume all others."""
        for partition in self._partitions.values():
            if partition.is_paused is not (partition.topic not in topics or len(partition.records) >= self._largest_batch):
                partition.is_paused = not partition.is_paused
                change = self._consumer.pause if partition.is_paused else self._consumer.resume
                change([TopicPartition(partition.topic, partition.number)])

    def _hand_out(self, topics: Collection[str], limit: int, invisible_seconds: float) -> list[Delivery]:
        """Hand out fetched records that are not held. Before that, release the records whose hold has expired."""
        with self._lock:
            now = self._clock()
            partitions = [
                partition
                for partition in self._partitions.values()
                if partition.topic in topics and partition.committed is not None
            ]
            for partition in partitions:
                if now >= partition.held_until:
                    partition.held.clear()
            waiting = [partition for partition in partitions if partition.waits_for_commit(self._largest_batch)]
            for partition in waiting:
                partition.sets_bound_ahead = True
            self._commit(waiting)
            deliveries: list[Delivery] = []
            batch_number = next(_batch_numbers)
            for partition in partitions:
                offsets = list(islice(partition.ready_offsets(self._largest_batch), limit - len(deliveries)))
                if offsets:
                    partition.held_until = now + invisible_seconds
                    key = partition.topic, partition.number
                    self._partitions[key] = self._partitions.pop(key)  # move it to the end
                for offset in offsets:
                    receipt = f"{partition.topic}/{partition.number}/{offset}/{batch_number}"
                    delivery_count = partition.hold(offset, receipt)
                    deliveries.append(
                        to_delivery(partition.records[offset], group=self.group, receipt=receipt, delivery_count=delivery_count)
                    )
            return deliveries

    def _read_committed_offsets(self) -> None:
        """Read the committed offsets of newly assigned partitions, and the bounds in the metadata of earlier holders."""
        new = [partition for partition in self._partitions.values() if partition.committed is None]
        if not new:
            return
        notes = committed_notes(self._consumer, [TopicPartition(partition.topic, partition.number) for partition in new])
        for partition, (topic_partition, note) in zip(new, notes.items(), strict=True):
            partition.committed = topic_partition.offset
            partition.committed_bound = note.handed_out_before
            partition.handed_out_before = max(partition.handed_out_before, note.handed_out_before)
            partition.topic_id = note.topic_id or self._topic_ids.get(partition.topic, "")
            if partition.position is None and topic_partition.offset >= 0:
                partition.position = topic_partition.offset

    def _commit(self, partitions: Iterable[HeldPartition]) -> set[HeldPartition]:
        """
        Commit the offsets and bounds of partitions that have changed. Return the partitions that this member may have lost.

        Kafka may reject a commit during a rebalance. The offset is then committed later, at the latest at the revocation.
        """
        wanted: dict[tuple[str, int], tuple[HeldPartition, int, int]] = {}
        for partition in partitions:
            offset, bound = partition.first_unacknowledged, partition.bound_to_commit(self._largest_batch)
            if offset is not None and (offset, bound) != (partition.committed, partition.committed_bound):
                wanted[partition.topic, partition.number] = partition, offset, bound
        if not wanted:
            return set()
        offsets = [
            TopicPartition(*key, offset, OffsetNote(self.owner.source, self.owner.project, bound, partition.topic_id).encode())
            for key, (partition, offset, bound) in wanted.items()
        ]
        lost: set[HeldPartition] = set()
        try:
            answers = self._consumer.commit(offsets=offsets, asynchronous=False) or []
        except RuntimeError as error:  # the client is closed
            raise BrokerUnavailable("The broker is closed.") from error
        except KafkaException as error:
            cause = error_of(error)
            if cause is None or cause.name() not in LOST | REBALANCING:
                raise call_error(error, f"commit offsets of group {self.group!r}") from error
            if cause.name() in LOST:
                lost = {partition for partition, _, _ in wanted.values()}
            answers = []
        for answer in answers:
            partition, offset, bound = wanted[answer.topic, answer.partition]
            if answer.error is None:
                partition.committed, partition.committed_bound = offset, bound
            elif answer.error.name() in LOST:
                lost.add(partition)
            elif answer.error.name() not in REBALANCING:
                raise call_error(KafkaException(answer.error), f"commit offsets of group {self.group!r}")
        for partition in lost:
            partition.committed = None  # unknown, since another member may have committed an offset
        return lost

    def _commit_idle(self) -> None:
        """
        Commit the position of partitions without fetched records, since transaction markers take offsets, too.

        For a partition that has been idle for IDLE_SECONDS and is read to its end, also commit that it is no longer in use.
        Otherwise, after a member was killed, records that arrive days later would be taken for redelivered ones.
        """
        idle = [partition for partition in self._partitions.values() if partition.committed is not None and not partition.records]
        now = time.monotonic()
        try:
            for partition in idle:
                topic_partition = TopicPartition(partition.topic, partition.number)
                position = max(self._consumer.position([topic_partition])[0].offset, partition.position or 0)
                if position > 0:
                    partition.position = position
                if partition.committed_bound and now - partition.changed_at >= IDLE_SECONDS:
                    partition.changed_at = now  # so that the cluster is asked at most every IDLE_SECONDS
                    if self._consumer.get_watermark_offsets(topic_partition, timeout=ANSWER_SECONDS)[1] <= position:
                        partition.sets_bound_ahead, partition.handed_out_before = False, 0
            self._commit(idle)
        except (BrokerUnavailable, KafkaException) as error:
            logger.info("Group %s: %s", self.group, describe(error))

    def _find_held(self, delivery: Delivery) -> tuple[HeldPartition | None, int]:
        """Return the partition and the offset of a delivery. The partition is None if the delivery is no longer held here."""
        partition, offset = self._partitions.get((delivery.topic, int(delivery.queue))), delivery.pos or 0
        return partition if partition is not None and partition.held.get(offset) == delivery.receipt else None, offset

    def _keep_alive(self) -> None:
        """
        Poll if nobody has for half of the maximum poll interval, so that this member keeps its partitions while a handler runs.

        More polls would do harm: a rebalance happens within a poll, and may revoke the partition of the handler's message.
        """
        is_due = time.monotonic() - self._polled_at >= MAX_POLL_INTERVAL.total_seconds() / 2
        if is_due and not self._polling.locked():
            self._fetch((), 1, 0.0)

    def _require_answers(self) -> None:
        """Raise BrokerUnavailable if there was no record for UNANSWERED_SECONDS, and no broker answers when asked."""
        if time.monotonic() - self._answered_at < UNANSWERED_SECONDS or not self._subscribed:
            return
        with self._polling:
            self._require_not_closed()
            try:
                self._consumer.list_topics(next(iter(self._subscribed)), timeout=ANSWER_SECONDS)
            except KafkaException as error:
                raise call_error(error, f"be asked for messages of group {self.group!r}") from error
        self._answered_at = time.monotonic()

    def _require_not_closed(self) -> None:
        """Raise BrokerUnavailable if the member is closed. The caller holds `_polling`."""
        if self._is_closed:
            raise BrokerUnavailable("The broker is closed.")

    def _on_assign(self, consumer: Consumer, topic_partitions: list[TopicPartition]) -> None:
        """Begin to read partitions that the group has assigned to this member."""
        with self._lock:
            self._has_joined = True
            start_offsets = self._set_start_offsets(topic_partitions)
            for key in [(topic_partition.topic, topic_partition.partition) for topic_partition in topic_partitions]:
                is_ordered = key[0] in self._topics and self._topics[key[0]].type is TopicType.FIFO
                self._partitions[key] = HeldPartition(*key, is_ordered, start_offsets.get(key), changed_at=time.monotonic())
            try:
                consumer.incremental_assign(topic_partitions)
            except KafkaException as error:  # an exception from this callback would make the client drop fetched records
                logger.warning("Group %s could not begin to read its new partitions: %s", self.group, describe(error))

    def _set_start_offsets(self, topic_partitions: Sequence[TopicPartition]) -> dict[tuple[str, int], int]:
        """Set and return the start offsets (OPTIONS["START"]) of partitions whose topic is new to the group."""
        start_offsets: dict[tuple[str, int], int] = {}
        try:
            new = [
                topic_partition
                for topic_partition in topic_partitions
                if (topic_partition.topic, topic_partition.partition) in self._new_partitions
            ]
            for topic_partition, (committed, _) in zip(
                new, committed_notes(self._consumer, new).items() if new else (), strict=True
            ):
                self._new_partitions.discard((topic_partition.topic, topic_partition.partition))
                if committed.offset < 0:
                    first, end = self._consumer.get_watermark_offsets(topic_partition, timeout=ANSWER_SECONDS)
                    topic_partition.offset = end if self._options.start == "latest" else first
                    start_offsets[topic_partition.topic, topic_partition.partition] = topic_partition.offset
        except (KafkaException, BrokerUnavailable) as error:  # an exception would leave the partitions without an assignment
            logger.warning(
                "Group %s: the start offsets could not be set; it may read new topics from their first message: %s",
                self.group,
                describe(error),
            )
        return start_offsets

    def _on_revoke(self, _: Consumer, topic_partitions: list[TopicPartition]) -> None:
        """Commit offsets, and bounds of the records that were really handed out, while Kafka accepts it; drop the partitions."""
        with self._lock:
            partitions = [
                self._partitions[key]
                for topic_partition in topic_partitions
                if (key := (topic_partition.topic, topic_partition.partition)) in self._partitions
            ]
            known = [partition for partition in partitions if partition.committed is not None]
            for partition in known:
                partition.sets_bound_ahead = False
            try:
                self._commit(known)
            except BrokerUnavailable as error:
                logger.warning(
                    "Group %s gives partitions back, but could not commit their offsets; messages may be delivered again: %s",
                    self.group,
                    error,
                )
            self._on_lost(_, topic_partitions)

    def _on_lost(self, _: Consumer, topic_partitions: list[TopicPartition]) -> None:
        """Drop partitions, and their records, without a commit."""
        with self._lock:
            for topic_partition in topic_partitions:
                partition = self._partitions.pop((topic_partition.topic, topic_partition.partition), None)
                if partition is not None and partition.is_paused:  # a pause would outlast the assignment
                    self._consumer.resume([topic_partition])


def _id_of(topic: TopicDescription) -> str:
    """Return the id of a topic; "" from a cluster that has none (before Kafka 2.8)."""
    return "" if topic.topic_id is None or str(topic.topic_id) == NO_TOPIC_ID else str(topic.topic_id)
