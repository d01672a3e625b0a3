"""Stores copies of records: retries, and dead letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException, Producer
from msgspec.structs import replace

from outbox.brokers.base import Delivery
from outbox.brokers.kafka.client import LARGEST_COPY, producer_settings
from outbox.brokers.kafka.codec import KEY, CopyNote, RecordHeaders, headers_with
from outbox.brokers.kafka.errors import call_error
from outbox.brokers.kafka.group_topics import STEPS, GroupTopics, step_of
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.kafka.producing import FLUSH_SECONDS
from outbox.errors import BrokerUnavailable

if TYPE_CHECKING:
    from confluent_kafka import Message

LONGEST_REASON = 2000  # characters


@dataclass(frozen=True, slots=True)
class RecordCopy:
    """A record to be stored. `value` None: a tombstone."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: RecordHeaders


class CopyProducer:
    """Stores records with one idempotent producer, which is made when it is needed."""

    def __init__(self, options: KafkaOptions, name: str) -> None:
        self._options = options
        self._name = name
        self._producer: Producer | None = None

    def store(self, copy: RecordCopy) -> None:
        """
        Store a record.

        Raises:
            BrokerUnavailable: it is not stored, or perhaps not.
            BrokerMisconfigured: somebody must act first; the text says how.
        """
        errors: list[KafkaError | None] = []
        try:
            producer = self._open()
            produce_copy(producer, copy, lambda error, _: errors.append(error))
            left = producer.flush(FLUSH_SECONDS)
        except (KafkaException, SystemError) as error:  # SystemError: from a callback, after a fatal error
            self.close()
            raise call_error(error, f"store a copy in topic {copy.topic!r}") from error
        if left or not errors:
            self.close()
            raise BrokerUnavailable(f"Kafka has not confirmed a copy in topic {copy.topic!r} within {FLUSH_SECONDS:g} s.")
        if errors[0] is not None:
            raise call_error(KafkaException(errors[0]), f"store a copy in topic {copy.topic!r}")

    def close(self) -> None:
        """Throw the producer away."""
        self._producer = None

    def _open(self) -> Producer:
        if self._producer is None:
            self._producer = Producer({**producer_settings(self._options, self._name), "message.max.bytes": LARGEST_COPY})
        return self._producer


def produce_copy(producer: Producer, copy: RecordCopy, on_delivery: object) -> None:
    """Hand a record to a producer."""
    producer.produce(copy.topic, copy.value, copy.key, copy.partition, headers=copy.headers, on_delivery=on_delivery)


def note_of(record: Message, delivery: Delivery) -> CopyNote:
    """Return the note for a copy of a delivered record."""
    return CopyNote(
        group=delivery.group,
        topic=delivery.topic,
        message_id=delivery.message_id,
        queue=delivery.queue,
        pos=delivery.pos or 0,
        stored_at=int(delivery.stored_at.timestamp() * 1000) if delivery.stored_at else 0,
        delivery_count=delivery.delivery_count,
        is_null=record.value() is None,
    )


def retry_copy(record: Message, note: CopyNote, *, now: float) -> RecordCopy:
    """Return the copy of a record for the next step of its delay, which ends at `note.retry_at`."""
    step = step_of(note.retry_at - now)
    note.step_at = min(note.retry_at, now + STEPS[step])
    topic = GroupTopics.of(note.topic, note.group).retry
    return RecordCopy(topic, step, record.key(), record.value(), headers_with(record, note))


def dead_copy(record: Message, note: CopyNote) -> RecordCopy:
    """Return the dead letter of a record. Its id is the record's place and time: a letter that is stored twice is one."""
    letter_id = f"{record.topic()}/{record.partition()}/{record.offset()}@{record.timestamp()[1]}"
    note.reason = note.reason[:LONGEST_REASON]
    topic = GroupTopics.of(note.topic, note.group).dead
    headers = headers_with(record, note)
    if (key := record.key()) is not None:
        headers.append((KEY, key))
    return RecordCopy(topic, 0, letter_id.encode(), record.value() or b"", headers)


def replayed_copy(letter: Message, note: CopyNote, *, now: float) -> RecordCopy:
    """Return the copy of a dead letter that is delivered to its group again, with deliveries counted from 1."""
    again = replace(note, retry_at=now, step_at=now, reason="", died_at=0.0, delivery_count=0)
    keys = [value for name, value in letter.headers() or [] if name == KEY]
    topic = GroupTopics.of(note.topic, note.group).retry
    value = None if note.is_null else letter.value()
    return RecordCopy(topic, 0, keys[0] if keys else None, value, headers_with(letter, again))
