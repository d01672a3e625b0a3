"""
Dead letters of consumer groups: a compacted topic for each group and topic, whose keys are the letters' ids.

A letter that is replayed or discarded gets a tombstone, in one transaction with the copy for its group. The transactional id is
the topic's own, and beginning fences out every earlier call that has not committed: of two operators, one settles a letter. The
tombstone names the call that wrote it, so an operator whose commit was not answered learns what became of it.

Letters are read from the topic's start once, and then from where the last look ended.
"""

from __future__ import annotations

import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, Producer, TopicPartition

from outbox.brokers.base import BrokerDeadLetter
from outbox.brokers.kafka.client import ANSWER_SECONDS, LARGEST_COPY, producer_settings
from outbox.brokers.kafka.codec import CopyNote, read_note, text_of, to_delivery
from outbox.brokers.kafka.copies import RecordCopy, produce_copy, replayed_copy
from outbox.brokers.kafka.errors import MISCONFIGURED, call_error, error_of
from outbox.brokers.kafka.group_topics import ALLOW, GroupTopics, ensure_group_topics
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.kafka.producing import FLUSH_SECONDS, open_transactional
from outbox.brokers.kafka.reading import read_end, read_records
from outbox.brokers.kafka.topics import find_topic
from outbox.errors import BrokerUnavailable
from outbox.message import Header

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message

TURN_SECONDS = 60.0  # an operator who is fenced out again and again gives up after this time
LONGEST_PAUSE = 4.0
SETTLED_BY = "outbox-settled-by"  # header of a tombstone


@dataclass(slots=True)
class _OpenLetter:
    offset: int
    letter: BrokerDeadLetter


@dataclass(slots=True)
class _LetterTopic:
    """A dead-letter topic as far as it was read. `settled`: letter -> the call that settled it."""

    name: str
    topic: str
    group: str
    next_offset: int = 0
    open: dict[str, _OpenLetter] = field(default_factory=dict)
    settled: dict[str, str] = field(default_factory=dict)


class KafkaDeadLetters:
    """
    The dead letters of some topics' groups.

    Args:
        topics: names of topics.
        clock: seconds since 1970.
    """

    def __init__(self, options: KafkaOptions, name: str, topics: Collection[str], clock: Callable[[], float]) -> None:
        self._options = options
        self._name = name
        self._topics = topics
        self._clock = clock
        self._read: dict[tuple[str, str], _LetterTopic] = {}

    def list(self, group: str, limit: int) -> list[BrokerDeadLetter]:
        """Return the dead letters of a group, oldest first. Raises BrokerUnavailable."""
        found = [one.letter for topic in self._topics for one in self._look(topic, group).open.values()]
        return sorted(found, key=lambda letter: letter.died_at)[:limit]

    def count(self, group: str) -> dict[str, int]:
        """Return the number of a group's dead letters by topic. Raises BrokerUnavailable."""
        return dict(+Counter({topic: len(self._look(topic, group).open) for topic in self._topics}))

    def replay(self, group: str, ids: Collection[str]) -> set[str]:
        """Store a copy of each letter for its group. Return the ids of those that were replayed now. Raises BrokerUnavailable."""
        now = self._clock()
        return self._settle(group, ids, lambda letter, note: [replayed_copy(letter, note, now=now)])

    def discard(self, group: str, ids: Collection[str]) -> set[str]:
        """Delete letters. Return the ids of those that were deleted now. Raises BrokerUnavailable."""
        return self._settle(group, ids, lambda letter, note: [])

    def _settle(self, group: str, ids: Collection[str], copies: Callable[[Message, CopyNote], Sequence[RecordCopy]]) -> set[str]:
        settled: set[str] = set()
        for topic in self._topics:
            if wanted := set(ids) & self._look(topic, group).open.keys():
                ensure_group_topics(self._options, self._name, topic, group)
                settled |= self._settle_in(topic, group, wanted, copies)
        return settled

    def _settle_in(
        self, topic: str, group: str, wanted: set[str], copies: Callable[[Message, CopyNote], Sequence[RecordCopy]]
    ) -> set[str]:
        """Settle letters of one topic; begins again where another operator has begun meanwhile."""
        call = uuid.uuid4().hex
        deadline = time.monotonic() + TURN_SECONDS
        pause = 0.1
        while True:
            producer = self._open_producer(topic, group)
            letters = self._look(topic, group)
            mine = {one for one in wanted if letters.settled.get(one) == call}
            if mine:  # the last commit was not answered, and took effect
                return mine
            left = wanted & letters.open.keys()
            try:
                self._write(producer, letters, left, call, copies)
            except (KafkaException, TimeoutError, SystemError) as raised:
                error = error_of(raised)
                if time.monotonic() > deadline or (error is not None and error.code() in MISCONFIGURED):
                    raise call_error(raised, f"settle the dead letters in topic {letters.name!r}") from raised
                time.sleep(random.uniform(0, pause))  # noqa: S311
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                return left

    def _open_producer(self, topic: str, group: str) -> Producer:
        size = {"message.max.bytes": LARGEST_COPY}
        if not self._options.transactions:
            return Producer({**producer_settings(self._options, self._name), **size})
        transactional_id = f"outbox.{GroupTopics.of(topic, group).dead}"
        return open_transactional(self._options, self._name, transactional_id, **size)[0]

    def _write(
        self,
        producer: Producer,
        letters: _LetterTopic,
        ids: set[str],
        call: str,
        copies: Callable[[Message, CopyNote], Sequence[RecordCopy]],
    ) -> None:
        """Store copies and tombstones. Raises KafkaException or SystemError unless all are stored."""
        if not ids:
            return
        errors: list[KafkaError] = []

        def report(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                errors.append(error)

        if self._options.transactions:
            producer.begin_transaction()
        found = list(self._records(letters, ids))
        for record in found:
            note = read_note(record)
            for copy in copies(record, note) if note else ():
                produce_copy(producer, copy, report)
        if not self._options.transactions:
            _flush(producer, errors)  # the copies first: a letter that is replayed twice is better than none
        for letter_id in ids:
            tombstone = RecordCopy(letters.name, 0, letter_id.encode(), None, [(SETTLED_BY, call.encode())])
            produce_copy(producer, tombstone, report)
        _flush(producer, errors)
        if self._options.transactions:
            producer.commit_transaction(ANSWER_SECONDS)

    def _records(self, letters: _LetterTopic, ids: set[str]) -> Sequence[Message]:
        offsets = {letters.open[one].offset for one in ids}
        place = TopicPartition(letters.name, 0)
        records = read_records(self._options, self._name, place, min(offsets), max(offsets) + 1)
        return [record for record in records if record.offset() in offsets]

    def _look(self, topic: str, group: str) -> _LetterTopic:
        """Read what has come since the last look. Raises BrokerUnavailable."""
        letters = self._read.setdefault((topic, group), _LetterTopic(GroupTopics.of(topic, group).dead, topic, group))
        place = TopicPartition(letters.name, 0)
        try:
            end = read_end(self._options, self._name, place, committed=True)
            if end < letters.next_offset:  # the topic was deleted and created again
                letters = self._read[topic, group] = _LetterTopic(letters.name, topic, group)
            if letters.next_offset < end:
                for record in read_records(self._options, self._name, place, letters.next_offset, end):
                    _note_record(letters, record)
                letters.next_offset = end
        except (KafkaException, TimeoutError) as error:
            if find_topic(self._options, self._name, letters.name, hint=ALLOW):
                raise call_error(error, f"read the dead letters in topic {letters.name!r}") from error
            letters = self._read[topic, group] = _LetterTopic(letters.name, topic, group)  # there is no such topic
        return letters


def _note_record(letters: _LetterTopic, record: Message) -> None:
    letter_id = text_of(record.key())
    note = read_note(record)
    if note is None or record.value() is None:
        if letters.open.pop(letter_id, None) is not None:
            letters.settled[letter_id] = text_of(dict(record.headers() or []).get(SETTLED_BY))
    elif (note.group, note.topic) == (letters.group, letters.topic):  # else of a group whose topic has the same name
        delivery = to_delivery(record, group=note.group, topic=note.topic)
        letter = BrokerDeadLetter(
            id=letter_id,
            group=note.group,
            topic=note.topic,
            message_id=delivery.message_id,
            reason=note.reason,
            delivery_count=note.delivery_count,
            died_at=datetime.fromtimestamp(note.died_at, UTC),
            source=delivery.headers.get(Header.SOURCE, ""),
        )
        letters.open[letter_id] = _OpenLetter(record.offset() or 0, letter)
        letters.settled.pop(letter_id, None)


def _flush(producer: Producer, errors: Sequence[KafkaError]) -> None:
    if producer.flush(FLUSH_SECONDS):
        raise BrokerUnavailable(f"Kafka has not confirmed the dead letters within {FLUSH_SECONDS:g} s.")
    if errors:
        raise KafkaException(errors[0])
