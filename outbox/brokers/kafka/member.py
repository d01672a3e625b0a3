"""
A member of a consumer group.

The group's offset in a partition is committed after a message was settled, so whatever happens to a member, the messages that it
had not settled are delivered again. What a member has fetched is in its windows (`window.py`), as long as it has the partition.

DELIVERY COUNTS. Kafka does not count deliveries, and a message that kills its process must not be taken for a new one. So before
records are handed out, the metadata of the committed offset names an offset up to which records may have been handed out. The
next holder of the partition counts one delivery more for all before it. The metadata also names the outbox of the group's inbox.

PASSING ON. A partition's messages come to the member that has it, and only there. So a member without a handler for one keeps it
for a while, and then leaves the group for a moment: its partitions go to other members, and the order of keys stays.

THREADS. One thread polls at a time, and rebalances take place within a poll. Bookkeeping and commits hold the other lock.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from outbox.brokers.base import Delivery
from outbox.brokers.kafka.client import ANSWER_SECONDS, MOST_BETWEEN_POLLS, member_settings
from outbox.brokers.kafka.codec import read_note, to_delivery
from outbox.brokers.kafka.copies import CopyProducer, dead_copy, note_of, retry_copy
from outbox.brokers.kafka.errors import MISCONFIGURED, call_error, describe, error_of
from outbox.brokers.kafka.group_topics import STEPS, GroupTopics, ensure_group_topics
from outbox.brokers.kafka.groups import count_members
from outbox.brokers.kafka.offset_notes import OffsetNote, committed_notes, require_owner
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.kafka.topics import find_topic
from outbox.brokers.kafka.window import FetchedRecord, PartitionWindow
from outbox.brokers.owners import NO_OWNER, GroupOwner, OwnedByAnother
from outbox.errors import BrokerMisconfigured, BrokerUnavailable, KeptByClient
from outbox.logs import get_logger, log_fields
from outbox.message import TopicSpec, TopicType

if TYPE_CHECKING:
    from confluent_kafka import Message

logger = get_logger(__name__)

POLL_SECONDS = 0.1  # `interrupt`, `close` and what is due again end the wait of `receive` after this time
HELD_SECONDS = STEPS[1]  # a retry up to this delay waits in its window
NOTED_AHEAD = 100  # offsets: the note of what was handed out is committed on its own once in as many
REFUSED_SECONDS = 10.0  # a topic that was refused is looked at again after this time
KEPT_SECONDS = 5.0  # a message without a handler stays here at least as long
# A member stays away at least as long: its partitions go to the same others each time, who have to leave, too, if they have
# no handler either.
AWAY_SECONDS = 5.0
JOIN_SECONDS = 1.0  # a member that leaves while it joins would be missed, and waited for, until its session is over
UNANSWERED_SECONDS = 5.0  # without a record: ask whether a broker is there

# The group has no such member any more, or none in this generation.
LOST = {"ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID", "STALE_MEMBER_EPOCH", "FENCED_INSTANCE_ID", "FENCED_MEMBER_EPOCH"}
ALLOW = "Allow this user Read on the topic."
REBALANCING = {"REBALANCE_IN_PROGRESS"}


class GroupMember:
    """
    One member of a group, with a client of its own.

    Args:
        topics: all topics of the broker by name.
        copies: stores retries and dead letters.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        options: KafkaOptions,
        name: str,
        group: str,
        topics: Mapping[str, TopicSpec],
        copies: CopyProducer,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.group = group
        self.owner: GroupOwner = NO_OWNER
        self.refusals: dict[str, str] = {}
        self._options = options
        self._name = name
        self._topics = topics
        self._copies = copies
        self._clock = clock
        self._consumer = Consumer(member_settings(options, name, group))
        self._subscribed: dict[str, str] = {}  # topics and retry topics -> topic
        self._asked_at: dict[str, float] = {}  # refused topics
        self._windows: dict[tuple[str, int], PartitionWindow] = {}
        self._new: set[tuple[str, int]] = set()  # partitions of topics that are new to the group
        self._held: dict[str, tuple[PartitionWindow, FetchedRecord]] = {}  # by receipt
        self._polling = threading.Lock()
        self._lock = threading.RLock()
        self._polled_at = self._answered_at = time.monotonic()
        self._leaves_at, self._away_until = float("inf"), float("-inf")
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
            self._leave_for_a_moment()
            self._subscribe(topics)
        deadline = time.monotonic() + wait.total_seconds()
        while True:
            self._fetch(limit, 0.0)
            if found := self._hand_out(topics, limit, invisible_for.total_seconds()):
                return found
            left = deadline - time.monotonic()
            if left <= 0 or self._is_interrupted:
                return []
            self._fetch(limit, min(left, POLL_SECONDS))
            self._require_answers()

    def renew(self, deliveries: Sequence[Delivery], invisible_for: timedelta) -> list[Delivery | None]:
        """Hold deliveries for that time from now. None for one that has ended or whose partition has gone."""
        self._keep_alive()
        with self._lock:
            due_at = self._clock() + invisible_for.total_seconds()
            found = [self._held.get(one.receipt) for one in deliveries]
            for held in found:
                if held is not None:
                    held[1].due_at = due_at
            return [one if held is not None else None for one, held in zip(deliveries, found, strict=True)]

    def release(self, deliveries: Sequence[Delivery]) -> None:
        """Make deliveries due at once, again for this member: their partitions stay with it."""
        with self._lock:
            for one in deliveries:
                self._postpone(one, 0.0)

    def ack(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Finish messages and commit the offsets. False for a delivery that has ended or whose partition has gone."""
        with self._lock:
            windows = [self._finish(one) for one in deliveries]
            lost = self._commit(one for one in windows if one is not None)
            return [one is not None and one.serial not in lost for one in windows]

    def retry(self, delivery: Delivery, after: timedelta) -> bool:
        """
        Deliver a message again after that time. A long delay is spent in the retry topic, except on ordered topics, where a
        message holds back those of its key.

        Raises:
            KeptByClient: the copy was not stored; this member delivers the message again.
        """
        seconds = after.total_seconds()
        with self._lock:
            held = self._held.get(delivery.receipt)
            if held is None:
                return False
            if held[0].is_ordered or seconds <= HELD_SECONDS:
                return self._postpone(delivery, seconds)
        note = note_of(held[1].record, delivery)
        note.retry_at = self._clock() + seconds
        try:
            self._copies.store(retry_copy(held[1].record, note, now=self._clock()))
        except BrokerUnavailable as error:
            self._keep(delivery, seconds, error)
        return self.ack([delivery])[0]

    def pass_on(self, delivery: Delivery, after: timedelta) -> bool:
        """Leave a message to another member: deliver it again here after that time, unless its partition has moved."""
        with self._lock:
            held = self._held.get(delivery.receipt)
            if held is None:
                return False
            held[1].is_passed_on = True
            if self._leaves_at == float("inf"):
                self._leaves_at = time.monotonic() + KEPT_SECONDS * random.uniform(1, 2)  # noqa: S311
            return self._postpone(delivery, after.total_seconds())

    def dead_letter(self, delivery: Delivery, reason: str) -> bool:
        """Store a message among the group's dead letters, and finish it. Raises KeptByClient, as `retry`."""
        with self._lock:
            held = self._held.get(delivery.receipt)
        if held is None:
            return False
        note = note_of(held[1].record, delivery)
        note.reason, note.died_at = reason, self._clock()
        try:
            self._copies.store(dead_copy(held[1].record, note))
        except BrokerUnavailable as error:
            self._keep(delivery, HELD_SECONDS, error)
        return self.ack([delivery])[0]

    def interrupt(self) -> None:
        """End the wait of `receive`, and of all later ones; from any thread."""
        self._is_interrupted = True

    def close(self) -> None:
        """Leave the group; what was settled is committed. A second call does nothing."""
        self._is_interrupted = True
        with self._polling:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                deadline = time.monotonic() + JOIN_SECONDS
                while self._subscribed and not self._has_joined and time.monotonic() < deadline:
                    self._consumer.poll(0.05)
                self._consumer.close()
            except (KafkaException, RuntimeError) as error:
                logger.info("Leaving group %s failed: %s", self.group, describe(error))

    def _leave_for_a_moment(self) -> None:
        """Leave the group until the others have taken its partitions, where a message waits for one with a handler."""
        if time.monotonic() < self._leaves_at:
            return
        self._leaves_at = float("inf")
        with self._lock:
            records = [one for window in self._windows.values() for one in window.records.values()]
        if not any(one.is_passed_on and not one.is_finished for one in records):
            return
        if count_members(self._options, self._name, self.group) < 2:
            return  # nobody would take the partitions
        logger.info("Group %s: this process leaves its partitions to others, which may handle what it cannot.", self.group)
        with suppress(KafkaException):  # then its session ends by itself
            self._consumer.close()
        self._consumer = Consumer(member_settings(self._options, self._name, self.group))
        self._subscribed.clear()
        self._has_joined = False
        self._away_until = time.monotonic() + AWAY_SECONDS * random.uniform(1, 3)  # noqa: S311

    def _subscribe(self, topics: Collection[str]) -> None:
        """Subscribe to topics that are not yet, each with its retry topic."""
        now = time.monotonic()
        if now < self._away_until:
            return
        new = [one for one in topics if one not in self._subscribed and self._asked_at.get(one, float("-inf")) <= now]
        try:
            for topic in new:
                try:
                    self._begin(topic)
                except (BrokerMisconfigured, OwnedByAnother) as error:
                    self._refuse(topic, str(error))
                else:
                    self.refusals.pop(topic, None)
                    self._subscribed |= {topic: topic, GroupTopics.of(topic, self.group).retry: topic}
        finally:  # those before an outage, too
            if new and self._subscribed:
                self._consumer.subscribe(
                    list(self._subscribed), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
                )

    def _begin(self, topic: str) -> None:
        """
        Prepare to read a topic: its owner, where the group begins, and its retry and dead-letter topics.

        Raises:
            BrokerUnavailable, BrokerMisconfigured
            OwnedByAnother: the group of that name has its inbox in another outbox.
        """
        found = find_topic(self._options, self._name, topic, hint=ALLOW)
        if found is None:
            raise call_error(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)), f"look the topic {topic!r} up")
        places = [TopicPartition(topic, number) for number in range(len(found.partitions))]
        count_members(self._options, self._name, self.group)  # raises where this user may not read for the group
        notes = committed_notes(self._consumer, places)
        require_owner(self.group, notes, self.owner)
        if all(place.offset < 0 for place in notes):  # a partition that is added later is read from its first message
            self._new |= {(place.topic, place.partition) for place in places}
        ensure_group_topics(self._options, self._name, topic, self.group)

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

    def _fetch(self, most: int, seconds: float) -> None:
        """Fetch what is there; wait at most so long for a first record."""
        with self._polling:
            self._require_open()
            self._polled_at = time.monotonic()
            if seconds and not self._subscribed:  # away, or refused
                time.sleep(seconds)
                records = []
            elif seconds:
                first = self._consumer.poll(seconds)
                records = [first] if first is not None else []
            else:
                records = self._consumer.consume(most, 0)
            with self._lock:  # before the other lock is let go: a rebalance may take the partition away
                problems = [problem for record in records if (problem := self._add(record)) is not None]
                self._commit_beginnings()
                self._pause_and_resume()
                if seconds and not records:
                    self._commit_positions()
            if problems:  # not before all records are in their windows: nobody fetches them again
                raise problems[0]

    def _add(self, record: Message) -> BrokerUnavailable | None:
        """Add a record to its window; return the exception where it is an error about which somebody must act."""
        if (error := record.error()) is not None:
            return self._note_error(record, error)
        self._answered_at = time.monotonic()
        window = self._windows.get((record.topic() or "", record.partition() or 0))
        if window is None:
            return None  # fetched before the partition was revoked
        if self.refusals and not window.is_retry:
            self.refusals.pop(window.topic, None)
        fetched = FetchedRecord(record)
        if window.is_retry:
            note = read_note(record)
            if note is None or (note.group, note.topic) != (self.group, window.topic):
                fetched.is_finished = True  # another group's, whose retry topic has the same name
            else:
                fetched.due_at, fetched.retry_at = note.step_at, note.retry_at
        window.add(fetched)
        return None

    def _note_error(self, record: Message, error: KafkaError) -> BrokerUnavailable | None:
        """Note an error that the client reports as a record; return it where it concerns the whole group."""
        if error.code() not in MISCONFIGURED:
            logger.info("Group %s: %s", self.group, describe(error))
            return None
        problem = call_error(KafkaException(error), f"read for group {self.group!r}", hint=ALLOW)
        if topic := self._subscribed.get(record.topic() or "", ""):
            self._refuse(topic, str(problem))
            return None
        return problem

    def _pause_and_resume(self) -> None:
        now = self._clock()
        for window in self._windows.values():
            if window.should_pause(now) is not window.is_paused:
                window.is_paused = not window.is_paused
                change = self._consumer.pause if window.is_paused else self._consumer.resume
                change([TopicPartition(window.stored_topic, window.partition)])

    def _hand_out(self, topics: Collection[str], limit: int, invisible_seconds: float) -> list[Delivery]:
        """Return messages that are due."""
        with self._lock:
            self._learn_notes()
            now = self._clock()
            found: list[Delivery] = []
            later: list[tuple[PartitionWindow, FetchedRecord]] = []
            for window in list(self._windows.values()):
                if window.topic not in topics or window.handed_out_before is None:
                    continue
                for fetched in window.due(now):
                    if fetched.retry_at > now:
                        later.append((window, fetched))
                        continue
                    if len(found) == limit:
                        break
                    found.append(self._hold(window, fetched, now + invisible_seconds))
            self._note_handed_out()
        for window, fetched in later:
            self._wait_on(window, fetched)
        return found

    def _hold(self, window: PartitionWindow, fetched: FetchedRecord, until: float) -> Delivery:
        self._held.pop(fetched.receipt, None)
        count = window.hand_out(fetched, until)
        self._held[fetched.receipt] = (window, fetched)
        return to_delivery(fetched.record, group=self.group, topic=window.topic, receipt=fetched.receipt, delivery_count=count)

    def _wait_on(self, window: PartitionWindow, fetched: FetchedRecord) -> None:
        """A step of a long delay is over: wait for the rest of it, here or in the next step."""
        now = self._clock()
        note = read_note(fetched.record)
        if note is None or fetched.retry_at - now <= HELD_SECONDS:
            fetched.due_at = fetched.retry_at
            return
        try:
            self._copies.store(retry_copy(fetched.record, note, now=now))
        except BrokerUnavailable as error:
            logger.warning("A retry of group %s could not be passed on, and waits here: %s", self.group, error)
            fetched.due_at = now + HELD_SECONDS
            return
        with self._lock:
            window.finish(fetched)
            self._commit([window])

    def _learn_notes(self) -> None:
        """Read the notes of partitions that were assigned."""
        new = [one for one in self._windows.values() if one.handed_out_before is None and one.records]
        if not new:
            return
        found = committed_notes(self._consumer, [TopicPartition(one.stored_topic, one.partition) for one in new])
        for window, (place, note) in zip(new, found.items(), strict=True):
            window.committed = place.offset if place.offset >= 0 else None
            window.handed_out_before = window.noted_until = note.handed_out_before

    def _note_handed_out(self) -> None:
        """Commit how far records may have been handed out, where the last note does not cover it."""
        beyond = [one for one in self._windows.values() if one.handed_out_until > one.noted_until]
        for window in beyond:
            window.noted_until = window.handed_out_until + NOTED_AHEAD
        if beyond:
            try:
                self._commit(beyond, is_forced=True)
            except BrokerUnavailable as error:
                logger.info("Group %s could not note what it hands out: %s", self.group, error)

    def _commit(self, windows: Iterable[PartitionWindow], *, is_forced: bool = False) -> set[int]:
        """
        Commit the offsets of windows, unless they are committed. Return the serials of those that this member may have lost.

        An offset that a rebalance does not let through is committed later, at the latest when the partition is revoked.
        """
        wanted = {(one.stored_topic, one.partition): one for one in windows}
        offsets = [
            TopicPartition(one.stored_topic, one.partition, offset, self._note(one, offset))
            for one in wanted.values()
            if (offset := one.offset_to_commit()) is not None and (is_forced or offset != one.committed)
        ]
        if not offsets:
            return set()
        lost: set[int] = set()
        try:
            answers = self._consumer.commit(offsets=offsets, asynchronous=False) or []
        except RuntimeError as error:  # the client is closed
            raise BrokerUnavailable("The broker is closed.") from error
        except KafkaException as error:
            cause = error_of(error)
            if cause is None or cause.name() not in LOST | REBALANCING:
                raise call_error(error, f"commit offsets of group {self.group!r}") from error
            return {one.serial for one in wanted.values()} if cause.name() in LOST else set()
        for answer in answers:
            window = wanted[answer.topic, answer.partition]
            if answer.error is None:
                window.committed = answer.offset
            elif answer.error.name() in LOST:
                lost.add(window.serial)
            elif answer.error.name() not in REBALANCING:
                raise call_error(KafkaException(answer.error), f"commit offsets of group {self.group!r}")
        return lost

    def _commit_beginnings(self) -> None:
        """Commit where the group begins, so that it begins there whatever happens, and what waits for it can be counted."""
        self._commit([one for one in self._windows.values() if one.committed is None and one.end is not None and not one.records])

    def _commit_positions(self) -> None:
        """Commit the ends of partitions with nothing unfinished: the ends of transactions take offsets, too."""
        idle = [one for one in self._windows.values() if not one.records and one.end is not None]
        for window in idle:
            position = self._consumer.position([TopicPartition(window.stored_topic, window.partition)])[0].offset
            window.end = max(window.end or 0, position)
        try:
            self._commit(idle)
        except BrokerUnavailable as error:
            logger.info("Group %s: %s", self.group, error)

    def _note(self, window: PartitionWindow, offset: int) -> str:
        until = window.noted_until if window.noted_until > offset else 0
        return OffsetNote(self.owner.source, self.owner.project, until).encode()

    def _finish(self, delivery: Delivery) -> PartitionWindow | None:
        """Finish a held message; return its window. None: it is not held."""
        held = self._held.pop(delivery.receipt, None)
        if held is None:
            return None
        window, fetched = held
        window.finish(fetched)
        return window

    def _postpone(self, delivery: Delivery, seconds: float) -> bool:
        """End a delivery; its message is due again after that time. Return whether it was held."""
        held = self._held.pop(delivery.receipt, None)
        if held is None:
            return False
        held[1].receipt = ""
        held[1].due_at = self._clock() + seconds
        return True

    def _keep(self, delivery: Delivery, seconds: float, error: BrokerUnavailable) -> None:
        """Deliver a message again later, whose copy was not stored. Raises KeptByClient."""
        with self._lock:
            if self._postpone(delivery, seconds):
                raise KeptByClient(f"{error} The message stays with this process for {seconds:.0f} s.") from error

    def _keep_alive(self) -> None:
        """
        Poll where nobody has for long, so that the group does not take the partitions away while a handler runs.

        Not sooner: a rebalance that a poll lets through may take the partition of the message that is being handled.
        """
        is_due = time.monotonic() - self._polled_at >= MOST_BETWEEN_POLLS.total_seconds() / 2
        if is_due and not self._polling.locked():
            self._fetch(1, 0.0)

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
            for place in places:
                topic = self._subscribed.get(place.topic, place.topic)
                self._windows[place.topic, place.partition] = PartitionWindow(
                    topic,
                    place.topic,
                    place.partition,
                    is_ordered=topic in self._topics and self._topics[topic].type is TopicType.FIFO,
                    is_retry=place.topic != topic,
                    end=begun.get((place.topic, place.partition)),
                )
            try:
                consumer.incremental_assign(places)
            except KafkaException as error:  # raised here, it would take along what the client fetched meanwhile
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
        """Commit what is finished, which still counts, and forget the rest."""
        with self._lock:
            going = [window for place in places if (window := self._windows.get((place.topic, place.partition))) is not None]
            used = [window for window in going if window.handed_out_before is not None]  # else nothing was handed out
            for window in used:
                window.noted_until = max(window.handed_out_until, window.handed_out_before or 0)
            try:
                self._commit(used, is_forced=True)
            except BrokerUnavailable as error:
                logger.warning("Group %s gives partitions back without a commit: %s", self.group, error)
            self._on_lost(_, places)

    def _on_lost(self, _: Consumer, places: list[TopicPartition]) -> None:
        with self._lock:
            for place in places:
                window = self._windows.pop((place.topic, place.partition), None)
                if window is not None:
                    for fetched in window.records.values():
                        self._held.pop(fetched.receipt, None)
