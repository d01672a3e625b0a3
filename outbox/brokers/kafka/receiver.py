"""
A member of a consumer group.

The group's offset in a partition is committed after a message was acknowledged, so whatever happens to a member, the messages
that it had not acknowledged are delivered again. Fetched messages are in the member's partitions (`partition.py`).

DELIVERY COUNTS. Kafka does not count deliveries, and a message that kills its process must not be taken for a new one. So before
records are handed out, the partition is *in use*: the metadata of the committed offset names an offset, which is the member's
largest hand further on, and no record behind that is handed out. The next holder of the partition takes all records before that
offset for redelivered. A member that gives the partition back commits how far it really came, and an idle one ends the use. The
metadata also names the outbox of the group's inbox.

THREADS. One thread polls at a time, and rebalances take place within a poll. Bookkeeping and commits hold the other lock.
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
from outbox.brokers.kafka.client import ANSWER_SECONDS, MOST_BETWEEN_POLLS, member_settings
from outbox.brokers.kafka.codec import to_delivery
from outbox.brokers.kafka.errors import MISCONFIGURED, call_error, describe, error_of
from outbox.brokers.kafka.groups import read_offsets, require_access
from outbox.brokers.kafka.offset_notes import OffsetNote, committed_notes, require_owner
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.kafka.partition import HeldPartition
from outbox.brokers.kafka.topics import describe_topics, existing, find_topic
from outbox.brokers.owners import NO_OWNER, GroupOwner, OwnedByAnother
from outbox.errors import BrokerMisconfigured, BrokerUnavailable
from outbox.logs import get_logger, log_fields
from outbox.message import TopicSpec, TopicType

if TYPE_CHECKING:
    from confluent_kafka import Message
    from confluent_kafka.admin import TopicDescription

logger = get_logger(__name__)

_hands = count(1)  # records of two hands have other receipts

POLL_SECONDS = 0.1  # `interrupt` and `close` end the wait of `receive` after this time
REFUSED_SECONDS = 10.0  # a topic that was refused is looked at again after this time
TOPICS_SECONDS = 10.0  # how soon a topic that was deleted and created again is noticed
OPEN_SECONDS = 60.0  # a transaction that is open for longer is told of
IDLE_SECONDS = 5.0  # a partition with nothing to read is no longer in use after this time
JOIN_SECONDS = 1.0  # a member that leaves while it joins would be missed, and waited for, until its session is over
UNANSWERED_SECONDS = 5.0  # without a record: ask whether a broker is there

# The group has no such member any more, or none in this generation.
LOST = {"ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID", "STALE_MEMBER_EPOCH", "FENCED_INSTANCE_ID", "FENCED_MEMBER_EPOCH"}
LEFT_OPEN = (
    "A transaction has been open in partition {partition} of topic {topic!r} since {since:%Y-%m-%d %H:%M:%S} UTC or before, at "
    "offset {offset}: of the {count} records behind it none is delivered to readers of committed ones. Have its producer end it, "
    "or find it (find-hanging) and end it (abort) with kafka-transactions.sh."
)
NO_TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAA"
ALLOW = "Allow this user Read on the topic."
REBALANCING = {"REBALANCE_IN_PROGRESS"}


class GroupMember:
    """
    One member of a group, with a client of its own.

    Args:
        topics: all topics of the broker by name.
        clock: seconds since 1970.
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
        self.known_topics: frozenset[str] = frozenset()  # of which the group's inbox has messages
        self.refusals: dict[str, str] = {}
        self._options = options
        self._name = name
        self._topics = topics
        self._clock = clock
        self._consumer = Consumer(member_settings(options, name, group))
        self._subscribed: set[str] = set()
        self._asked_at: dict[str, float] = {}  # refused topics
        self.left_open: dict[str, str] = {}  # topics with a transaction that does not end
        self._open: dict[TopicPartition, tuple[int, float]] = {}  # its first offset, and since when it is known
        self._topic_ids: dict[str, str] = {}
        self._looked_at = time.monotonic()
        self._look = threading.Thread()
        self._new: set[tuple[str, int]] = set()  # partitions of topics that are new to the group
        self._partitions: dict[tuple[str, int], HeldPartition] = {}  # the next to hand out first
        self._largest_hand = 1
        self._polling = threading.Lock()
        self._lock = threading.RLock()
        self._polled_at = self._answered_at = time.monotonic()
        self._is_interrupted = self._is_closed = self._has_joined = False

    def receive(self, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta) -> list[Delivery]:
        """
        Receive messages, and wait for the first one.

        Raises:
            BrokerUnavailable: no broker answers.
            BrokerMisconfigured: this user may not read the topics, or not for the group.
        """
        with self._polling:
            self._require_open()
            self._subscribe(topics)
        with self._lock:
            self._largest_hand = max(self._largest_hand, limit)
            self._look_at_topics()
        deadline = time.monotonic() + wait.total_seconds()
        seconds = 0.0
        while True:
            self._fetch(topics, limit, seconds)
            if hand := self._hand_out(topics, limit, invisible_for.total_seconds()):
                return hand
            seconds = min(deadline - time.monotonic(), POLL_SECONDS)
            if seconds <= 0 or self._is_interrupted:
                return []
            self._require_answers()

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Hold deliveries, with all of their partitions, for that time from now. None for one that has ended."""
        self._keep_alive()
        with self._lock:
            renewed: list[Delivery | None] = []
            for delivery in deliveries:
                partition, _ = self._find(delivery)
                if partition is not None:
                    partition.held_until = self._clock() + invisible_for.total_seconds()
                renewed.append(delivery if partition is not None else None)
            return renewed

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Hand deliveries out again, to this member: their partitions stay with it."""
        with self._lock:
            for delivery in deliveries:
                partition, offset = self._find(delivery)
                if partition is not None:
                    del partition.held[offset]

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Finish messages and commit the offsets. False for a delivery that has ended, or whose partition has gone."""
        now = time.monotonic()
        with self._lock:
            ended: list[HeldPartition | None] = []
            for delivery in deliveries:
                partition, offset = self._find(delivery)
                if partition is not None:
                    del partition.held[offset], partition.records[offset]
                    partition.changed_at = now
                ended.append(partition)
            lost = self._commit({partition for partition in ended if partition is not None})
            return [partition is not None and partition not in lost for partition in ended]

    def interrupt(self) -> None:
        """End the wait of `receive`, and of all later ones; from any thread."""
        self._is_interrupted = True

    def close(self) -> None:
        """Leave the group; acknowledged messages are committed. A second call does nothing."""
        self._is_interrupted = True
        with self._polling:
            if self._is_closed:
                return
            self._is_closed = True
            if self._look.is_alive():
                self._look.join(ANSWER_SECONDS)
            try:
                deadline = time.monotonic() + JOIN_SECONDS
                while self._subscribed and not self._has_joined and time.monotonic() < deadline:
                    self._consumer.poll(0.05)
                # A revocation within `close` may wait for ever for a thread of the client that has ended, and holds the GIL.
                self._consumer.unsubscribe()
                deadline = time.monotonic() + ANSWER_SECONDS
                while self._partitions and time.monotonic() < deadline:
                    self._consumer.poll(0.05)
                self._consumer.close()
            except (KafkaException, RuntimeError) as error:
                logger.info("Leaving group %s failed: %s", self.group, describe(error))

    def _subscribe(self, topics: Collection[str]) -> None:
        """Subscribe to topics that are not yet."""
        now = time.monotonic()
        new = [topic for topic in topics if topic not in self._subscribed and self._asked_at.get(topic, 0.0) <= now]
        try:
            for topic in new:
                try:
                    self._begin(topic)
                except (BrokerMisconfigured, OwnedByAnother) as error:
                    self._refuse(topic, str(error))
                else:
                    self.refusals.pop(topic, None)
                    self._subscribed.add(topic)
        finally:  # including topics that were prepared before an outage
            if new and self._subscribed:
                self._consumer.subscribe(
                    list(self._subscribed), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
                )

    def _begin(self, topic: str) -> None:
        """
        Prepare to read a topic: its owner, and where the group begins.

        Raises:
            BrokerUnavailable, BrokerMisconfigured
            OwnedByAnother: the group of that name has its inbox in another outbox.
        """
        description = find_topic(self._options, self._name, topic, hint=ALLOW)
        if description is None:
            raise call_error(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)), f"look the topic {topic!r} up")
        self._topic_ids[topic] = _id_of(description)
        require_access(self._options, self._name, self.group)
        places = [TopicPartition(topic, number) for number in range(len(description.partitions))]
        notes = committed_notes(self._consumer, places)
        require_owner(self.group, notes, self.owner)
        if all(place.offset < 0 for place in notes) and topic not in self.known_topics:  # Kafka deletes offsets after a while
            # A partition that is added later is read from its first message.
            self._new |= {(place.topic, place.partition) for place in places}

    def _look_at_topics(self) -> None:
        """Ask again, after a while, for the topics' ids and open transactions; in a thread, since an answer may take seconds."""
        if time.monotonic() >= self._looked_at + TOPICS_SECONDS and not self._look.is_alive():
            self._looked_at = time.monotonic()
            self._look = threading.Thread(target=self._ask_about_topics, name=f"Topics of group {self.group}", daemon=True)
            self._look.start()

    def _ask_about_topics(self) -> None:
        with suppress(BrokerUnavailable):  # the earlier answer stands
            there = existing(describe_topics(self._options, self._name, set(self._subscribed)))
            self._topic_ids |= {topic: _id_of(description) for topic, description in there.items()}
            self._look_for_open()

    def _look_for_open(self) -> None:
        """Note transactions before which the end for readers of committed records has stood for long."""
        with self._lock:
            places = [TopicPartition(*key) for key, partition in self._partitions.items() if not partition.records]
        latest, now = OffsetSpec.latest(), self._clock()
        stable = read_offsets(self._options, self._name, places, latest)
        ends = read_offsets(self._options, self._name, places, latest, IsolationLevel.READ_UNCOMMITTED)
        before, self._open = self._open, {}
        left_open = {}
        for place, offset in stable.items():
            if offset < ends[place]:
                known, since = before.get(place, (offset, now))
                self._open[place] = offset, since if known == offset else now
                if known == offset and now - since >= OPEN_SECONDS:
                    left_open[place.topic] = LEFT_OPEN.format(
                        partition=place.partition,
                        topic=place.topic,
                        since=datetime.fromtimestamp(since, UTC),
                        offset=offset,
                        count=ends[place] - offset,
                    )
        self.left_open = left_open

    def _begin_again(self, partition: HeldPartition, topic_id: str) -> None:
        """Begin at the start of a topic that was deleted and created again. The offset of the old one may be there, too."""
        logger.warning(
            "Topic %r was deleted and created again: group %r reads partition %s from its first message.",
            partition.topic,
            self.group,
            partition.number,
            extra=log_fields(group=self.group, topic=partition.topic),
        )
        place = TopicPartition(partition.topic, partition.number)
        try:
            place.offset = self._consumer.get_watermark_offsets(place, timeout=ANSWER_SECONDS)[0]
            self._consumer.seek(place)
        except KafkaException as error:
            raise call_error(error, f"go to the start of topic {partition.topic!r}", hint=ALLOW) from error
        partition.begin_again(place.offset)
        partition.topic_id = topic_id

    def _refuse(self, topic: str, reason: str) -> None:
        if self.refusals.get(topic) != reason:
            logger.error(
                "Group %r cannot receive from topic %r as configured: %s",
                self.group,
                topic,
                reason,
                extra=log_fields(group=self.group, topic=topic),
            )
        self.refusals[topic] = reason
        self._asked_at[topic] = time.monotonic() + REFUSED_SECONDS

    def _fetch(self, topics: Collection[str], most: int, seconds: float) -> None:
        """Fetch records up to a full hand; wait for a first one for the given time at most."""
        with self._polling:
            self._require_open()
            self._polled_at = time.monotonic()
            with self._lock:
                self._pause_and_resume(topics)
                mine = [partition for partition in self._partitions.values() if partition.topic in topics]
                waiting = sum(len(partition.records) - len(partition.held) for partition in mine)
            records: list[Message] = []
            if seconds and not self._subscribed:  # all topics are refused
                time.sleep(seconds)
            elif seconds and (first := self._consumer.poll(seconds)) is not None:
                records.append(first)
            if records or not seconds:
                records += self._consumer.consume(max(1, most - waiting - len(records)), 0)
            with self._lock:  # before the other lock is let go: a rebalance may take the partition away
                problems = [problem for record in records if (problem := self._add(record)) is not None]
                self._read_notes()
                for partition in self._partitions.values():
                    current = self._topic_ids.get(partition.topic, "")
                    if current and partition.topic_id not in ("", current):
                        self._begin_again(partition, current)
                begun = [partition for partition in self._partitions.values() if (partition.committed or 0) < 0]
                self._commit([partition for partition in begun if not partition.records])
                if seconds and not records:
                    self._commit_idle()
            if problems:  # not before all records are in their partitions: nobody fetches them again
                raise problems[0]

    def _add(self, record: Message) -> BrokerUnavailable | None:
        """Add a record to its partition; return the exception where it is an error about which somebody must act."""
        if (error := record.error()) is not None:
            return self._note_error(record, error)
        self._answered_at = time.monotonic()
        partition = self._partitions.get((record.topic() or "", record.partition() or 0))
        if partition is not None:  # not fetched before the partition was revoked
            self.refusals.pop(partition.topic, None)
            partition.add(record, self._answered_at)
        return None

    def _note_error(self, record: Message, error: KafkaError) -> BrokerUnavailable | None:
        """Note an error that the client reports as a record; return it where it concerns the whole group."""
        if error.code() not in MISCONFIGURED:
            logger.info("Group %s: %s", self.group, describe(error))
            return None
        problem = call_error(KafkaException(error), f"read for group {self.group!r}", hint=ALLOW)
        topic = record.topic() or ""
        if topic in self._subscribed:
            self._refuse(topic, str(problem))
            return None
        return problem

    def _pause_and_resume(self, topics: Collection[str]) -> None:
        """Pause the partitions of other topics, and those with a full hand that cannot be handed out now."""
        for partition in self._partitions.values():
            if partition.is_paused is not (partition.topic not in topics or len(partition.records) >= self._largest_hand):
                partition.is_paused = not partition.is_paused
                change = self._consumer.pause if partition.is_paused else self._consumer.resume
                change([TopicPartition(partition.topic, partition.number)])

    def _hand_out(self, topics: Collection[str], limit: int, invisible_seconds: float) -> list[Delivery]:
        """Return messages that wait; those that have expired wait again."""
        with self._lock:
            now = self._clock()
            mine = [
                partition
                for partition in self._partitions.values()
                if partition.topic in topics and partition.committed is not None
            ]
            for partition in mine:
                if now >= partition.held_until:
                    partition.held.clear()
            waiting = [partition for partition in mine if partition.waits_for_commit(self._largest_hand)]
            for partition in waiting:
                partition.is_in_use = True
            self._commit(waiting)
            hand: list[Delivery] = []
            number = next(_hands)
            for partition in mine:
                offsets = list(islice(partition.ready(self._largest_hand), limit - len(hand)))
                if offsets:
                    partition.held_until = now + invisible_seconds
                    key = partition.topic, partition.number
                    self._partitions[key] = self._partitions.pop(key)  # behind the others
                for offset in offsets:
                    receipt = f"{partition.topic}/{partition.number}/{offset}/{number}"
                    count = partition.hold(offset, receipt)
                    hand.append(to_delivery(partition.records[offset], group=self.group, receipt=receipt, delivery_count=count))
            return hand

    def _read_notes(self) -> None:
        """Read the committed offsets of partitions that were assigned, and what earlier holders have noted there."""
        new = [partition for partition in self._partitions.values() if partition.committed is None]
        if not new:
            return
        notes = committed_notes(self._consumer, [TopicPartition(partition.topic, partition.number) for partition in new])
        for partition, (place, note) in zip(new, notes.items(), strict=True):
            partition.committed = place.offset
            partition.in_use_until = note.handed_out_before
            partition.seen_before = max(partition.seen_before, note.handed_out_before)
            partition.topic_id = note.topic_id or self._topic_ids.get(partition.topic, "")
            if partition.position is None and place.offset >= 0:
                partition.position = place.offset

    def _commit(self, partitions: Iterable[HeldPartition]) -> set[HeldPartition]:
        """
        Commit offsets and notes, unless they are committed. Return the partitions that this member may have lost.

        An offset that a rebalance does not let through is committed later, at the latest when the partition is revoked.
        """
        wanted: dict[tuple[str, int], tuple[HeldPartition, int, int]] = {}
        for partition in partitions:
            offset, until = partition.first_open, partition.note_until(self._largest_hand)
            if offset is not None and (offset, until) != (partition.committed, partition.in_use_until):
                wanted[partition.topic, partition.number] = partition, offset, until
        if not wanted:
            return set()
        offsets = [
            TopicPartition(*key, offset, OffsetNote(self.owner.source, self.owner.project, until, partition.topic_id).encode())
            for key, (partition, offset, until) in wanted.items()
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
            partition, offset, until = wanted[answer.topic, answer.partition]
            if answer.error is None:
                partition.committed, partition.in_use_until = offset, until
            elif answer.error.name() in LOST:
                lost.add(partition)
            elif answer.error.name() not in REBALANCING:
                raise call_error(KafkaException(answer.error), f"commit offsets of group {self.group!r}")
        for partition in lost:  # another member may have committed there
            partition.committed = None
        return lost

    def _commit_idle(self) -> None:
        """
        Commit the ends of partitions with nothing open, since the ends of transactions take offsets, too, and that those are no
        longer in use that were idle for a while: else what a killed member has left there would concern records of days later.
        """
        idle = [partition for partition in self._partitions.values() if partition.committed is not None and not partition.records]
        now = time.monotonic()
        try:
            for partition in idle:
                place = TopicPartition(partition.topic, partition.number)
                position = max(self._consumer.position([place])[0].offset, partition.position or 0)
                if position > 0:
                    partition.position = position
                if partition.in_use_until and now - partition.changed_at >= IDLE_SECONDS:
                    partition.changed_at = now  # which asks once in a while
                    if self._consumer.get_watermark_offsets(place, timeout=ANSWER_SECONDS)[1] <= position:
                        partition.is_in_use, partition.seen_before = False, 0
            self._commit(idle)
        except (BrokerUnavailable, KafkaException) as error:
            logger.info("Group %s: %s", self.group, describe(error))

    def _find(self, delivery: Delivery) -> tuple[HeldPartition | None, int]:
        """Return the partition and the offset of a delivery; no partition where it has ended, or the partition has gone."""
        partition, offset = self._partitions.get((delivery.topic, int(delivery.queue))), delivery.pos or 0
        return partition if partition is not None and partition.held.get(offset) == delivery.receipt else None, offset

    def _keep_alive(self) -> None:
        """
        Poll where nobody has for long, so that the group does not take the partitions away while a handler runs.

        Not sooner: a rebalance that a poll lets through may take the partition of the message that is being handled.
        """
        is_due = time.monotonic() - self._polled_at >= MOST_BETWEEN_POLLS.total_seconds() / 2
        if is_due and not self._polling.locked():
            self._fetch((), 1, 0.0)

    def _require_answers(self) -> None:
        """Raise BrokerUnavailable where no broker has answered for a while."""
        if time.monotonic() - self._answered_at < UNANSWERED_SECONDS or not self._subscribed:
            return
        with self._polling:
            self._require_open()
            try:
                self._consumer.list_topics(next(iter(self._subscribed)), timeout=ANSWER_SECONDS)
            except KafkaException as error:
                raise call_error(error, f"be asked for messages of group {self.group!r}") from error
        self._answered_at = time.monotonic()

    def _require_open(self) -> None:
        """Raise BrokerUnavailable where the member has left; the caller holds the lock of polls."""
        if self._is_closed:
            raise BrokerUnavailable("The broker is closed.")

    def _on_assign(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        with self._lock:
            self._has_joined = True
            begun = self._begin_partitions(places)
            for key in [(place.topic, place.partition) for place in places]:
                is_ordered = key[0] in self._topics and self._topics[key[0]].type is TopicType.FIFO
                self._partitions[key] = HeldPartition(*key, is_ordered, begun.get(key), changed_at=time.monotonic())
            try:
                consumer.incremental_assign(places)
            except KafkaException as error:  # raised here, it would drop fetched records
                logger.warning("Group %s could not begin with its partitions: %s", self.group, describe(error))

    def _begin_partitions(self, places: Sequence[TopicPartition]) -> dict[tuple[str, int], int]:
        """Set the offsets of partitions in which the group begins, and return them."""
        begun: dict[tuple[str, int], int] = {}
        try:
            new = [place for place in places if (place.topic, place.partition) in self._new]
            for place, (committed, _) in zip(new, committed_notes(self._consumer, new).items() if new else (), strict=True):
                self._new.discard((place.topic, place.partition))
                if committed.offset < 0:
                    ends = self._consumer.get_watermark_offsets(place, timeout=ANSWER_SECONDS)
                    place.offset = begun[place.topic, place.partition] = ends[self._options.start == "latest"]
        except (KafkaException, BrokerUnavailable) as error:  # an error would leave the partitions without an assignment
            logger.warning("Group %s may begin with first messages of topics: %s", self.group, describe(error))
        return begun

    def _on_revoke(self, _: Consumer, places: list[TopicPartition]) -> None:
        """Commit what was acknowledged, which still counts, and how far records were handed out; forget the rest."""
        with self._lock:
            partitions = [
                self._partitions[key] for place in places if (key := (place.topic, place.partition)) in self._partitions
            ]
            known = [partition for partition in partitions if partition.committed is not None]
            for partition in known:
                partition.is_in_use = False
            try:
                self._commit(known)
            except BrokerUnavailable as error:
                logger.warning("Group %s gives partitions back without a commit: %s", self.group, error)
            self._on_lost(_, places)

    def _on_lost(self, _: Consumer, places: list[TopicPartition]) -> None:
        with self._lock:
            for place in places:
                partition = self._partitions.pop((place.topic, place.partition), None)
                if partition is not None and partition.is_paused:  # a pause would outlast the assignment
                    self._consumer.resume([place])


def _id_of(topic: TopicDescription) -> str:
    """Return the id of a topic; "" from a cluster that has none (before Kafka 2.8)."""
    return "" if topic.topic_id is None or str(topic.topic_id) == NO_TOPIC_ID else str(topic.topic_id)
