"""
Dead letters: a quorum queue for each group and topic, which RabbitMQ itself fills, too.

A letter is a copy with the reason in its headers, or the message itself where RabbitMQ gave it up: it was delivered too often
without an end, or stayed in its queue for longer than the topic's retention. To list letters is to receive them and to put
them back; another process that lists them at the same moment may not see them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import NotFound

from outbox.brokers.base import DeadLetter, Delivery
from outbox.brokers.rabbitmq.connection import LOST, Connection, describe
from outbox.brokers.rabbitmq.envelope import ATTEMPTS, DIED_AT, REASON, attempts_before, copy_of, micros_of, time_of, to_delivery
from outbox.brokers.rabbitmq.sender import Publication
from outbox.brokers.rabbitmq.topology import MOST_AT_ONCE, dead_queue_name, queue_name
from outbox.errors import BrokerUnavailable

ALL = 0  # the delivery tag that stands for all that are not settled

REASONS = {
    "delivery_limit": "RabbitMQ delivered it too often, and no delivery was ended (DELIVERY_LIMIT).",
    "expired": "It lay in its queue for longer than the topic's retention.",
    "maxlen": "Its queue was full.",
}


@dataclass(frozen=True, slots=True)
class QueuedLetter:
    """A letter in its queue."""

    letter: DeadLetter
    message: amqp.Message
    delivery: Delivery


class DeadLetterQueues:
    """
    The dead letters of some topics' groups, over a connection of their own.

    Args:
        publish: publishes messages and raises BrokerUnavailable unless all are stored.
    """

    def __init__(self, connection: Connection, topics: Collection[str], publish: Callable[[Sequence[Publication]], None]) -> None:
        self._connection = connection
        self._topics = topics
        self._publish = publish
        self._channel: amqp.Channel | None = None
        self._serial = 0

    def read(self, group: str, limit: int) -> list[DeadLetter]:
        """Return the letters of a group, oldest first."""
        found: list[DeadLetter] = []
        for topic in self._topics:
            with self._letters(group, topic, min(limit, MOST_AT_ONCE)) as (_, letters):
                found += [one.letter for one in letters]
        return sorted(found, key=lambda letter: letter.died_at)[:limit]

    def replay(self, group: str, ids: Sequence[str]) -> int:
        """Put letters back into the queue of their group, with attempts from 1. Return their number."""

        def put_back(channel: amqp.Channel, topic: str, chosen: Sequence[QueuedLetter]) -> None:
            queue = queue_name(topic, group)
            self._publish([Publication("", queue, copy_of(one.delivery, attempts=0)) for one in chosen])

        return self._take(group, ids, put_back)

    def discard(self, group: str, ids: Sequence[str]) -> int:
        """Delete letters. Return their number."""
        return self._take(group, ids, lambda channel, topic, chosen: None)

    def _take(self, group: str, ids: Sequence[str], act: Callable[[amqp.Channel, str, Sequence[QueuedLetter]], None]) -> int:
        """Act on letters, then take them out of their queues."""
        wanted, count = set(ids), 0
        for topic in self._topics:
            if not any(one.startswith(f"{topic}/") for one in wanted):
                continue
            with self._letters(group, topic, MOST_AT_ONCE) as (channel, letters):
                chosen = [one for one in letters if one.letter.id in wanted]
                if not chosen:
                    continue
                act(channel, topic, chosen)
                for one in chosen:
                    channel.basic_ack(one.message.delivery_info["delivery_tag"])
                count += len(chosen)
        return count

    @contextmanager
    def _letters(self, group: str, topic: str, limit: int) -> Iterator[tuple[amqp.Channel, list[QueuedLetter]]]:
        """Yield the channel and the dead letters of a queue. Those that are not acknowledged go back."""
        try:
            with self._connection.use() as connection:
                channel = self._open_channel(connection)
                messages: list[amqp.Message] = []
                channel.basic_qos(0, limit, False)
                try:
                    tag = channel.basic_consume(dead_queue_name(topic, group), callback=messages.append)
                except NotFound:  # the channel was opened anew
                    yield channel, []
                    return
                channel.basic_cancel(tag)
                try:
                    yield channel, [_read(group, topic, message) for message in messages]
                finally:
                    channel.send_method(spec.Basic.Nack, "Lbb", (ALL, True, True))
        except LOST as error:
            raise BrokerUnavailable(f"RabbitMQ did not show the dead letters: {describe(error)}.") from error

    def _open_channel(self, connection: amqp.Connection) -> amqp.Channel:
        """Return one channel for all calls: what one call put back is there for the next."""
        if self._channel is None or self._serial != self._connection.serial:
            self._channel, self._serial = connection.channel(), self._connection.serial
        return self._channel


def _read(group: str, topic: str, message: amqp.Message) -> QueuedLetter:
    headers = message.properties.get("application_headers") or {}
    delivery = to_delivery(message, group=group, topic=topic, receipt="")
    if died_at := time_of(headers.get(DIED_AT)):
        reason, attempt = str(headers.get(REASON, "")), int(headers.get(ATTEMPTS, 1))
    else:
        died_at, reason = _death_of(headers)
        attempt = max(1, attempts_before(headers))
    name = f"{topic}/{delivery.message_id}/{micros_of(died_at)}"
    return QueuedLetter(DeadLetter(name, group, topic, delivery.message_id, reason, attempt, died_at), message, delivery)


def _death_of(headers: dict[str, Any]) -> tuple[datetime, str]:
    """Return when and why RabbitMQ gave a message up."""
    deaths = headers.get("x-death") or [{}]
    at = deaths[0].get("time")
    why = str(deaths[0].get("reason", "unknown"))
    died_at = at.replace(tzinfo=UTC) if isinstance(at, datetime) else datetime.fromtimestamp(0, UTC)
    return died_at, REASONS.get(why, f"RabbitMQ gave it up: {why}.")
