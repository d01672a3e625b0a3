"""
Dead letters: a quorum queue for each group and topic, which RabbitMQ itself fills, too.

A letter is a copy with the reason in its headers, or the message itself where RabbitMQ gave it up: it stayed in its queue for
longer than the topic's retention. To list letters is to receive them and to put them back, and meanwhile the server counts none
of them. So one process at a time has the letters of a queue (`x-single-active-consumer`), and everyone else, who counts included,
waits until the queue has no consumer. A process that has them gives them back by closing its channel: all at once.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import amqp

from outbox.brokers.base import BrokerDeadLetter, Delivery
from outbox.brokers.rabbitmq.envelope import DIED_AT, REASON, copy_of, count_noted, micros_of, time_of, to_delivery
from outbox.brokers.rabbitmq.sender import Publication
from outbox.brokers.rabbitmq.topology import MOST_AT_ONCE, dead_queue_name, queue_name, state_of
from outbox.errors import BrokerUnavailable
from outbox.message import Header

PORTION = 100  # letters that are settled together
WINDOWS = (
    5 * PORTION,
    50 * PORTION,
    MOST_AT_ONCE,
)  # how many letters to search through; more only if the wanted ones are not there

COUNT_SECONDS = 2.0  # who counts waits this long for the process that has the letters
TURN_SECONDS = 30.0  # who lists or settles waits this long for it
LOOK_SECONDS = 0.01  # between two looks of who counts; who lists looks less often, so that a count comes in between
QUIET_SECONDS = 0.25  # without a letter: ask whether there are more

REASONS = {
    "delivery_limit": "RabbitMQ delivered it too often, and no delivery was ended (x-delivery-limit).",
    "expired": "It lay in its queue for longer than the topic's retention.",
    "maxlen": "Its queue was full.",
}


def _in_use(queue: str) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"Another process reads the dead letters in queue {queue!r}.",
        hint="Try again when it is done; if that takes long, look for the consumer of the queue in RabbitMQ.",
    )


@dataclass(frozen=True, slots=True)
class QueuedLetter:
    """A letter in its queue."""

    letter: BrokerDeadLetter
    delivery: Delivery
    tag: int


class DeadLetterQueues:
    """
    The dead letters of some topics' groups.

    Args:
        asking: opens a channel, and closes it in the end; raises BrokerUnavailable("RabbitMQ did not ...").
        publish: publishes messages and raises BrokerUnavailable unless all are stored.
    """

    def __init__(
        self,
        asking: Callable[[str], AbstractContextManager[amqp.Channel]],
        topics: Collection[str],
        publish: Callable[[Sequence[Publication]], None],
    ) -> None:
        self._asking = asking
        self._topics = topics
        self._publish = publish

    def count(self, group: str) -> dict[str, int]:
        """
        Return the number of a group's letters by topic, without topics that have none.

        Raises:
            BrokerUnavailable: another process reads them, and is not done in time.
        """
        found = {}
        deadline = time.monotonic() + COUNT_SECONDS
        with self._asking("count dead letters") as channel:
            for topic in self._topics:
                if number := _count(channel, dead_queue_name(topic, group), deadline, LOOK_SECONDS):
                    found[topic] = number
        return found

    def read(self, group: str, limit: int) -> list[BrokerDeadLetter]:
        """Return the letters of a group, oldest first."""
        found: list[BrokerDeadLetter] = []
        for topic in self._topics:
            with self._reading(group, topic, min(limit, MOST_AT_ONCE)) as reader:
                found += [_read(group, topic, message).letter for message in reader.messages()]
        return sorted(found, key=lambda letter: letter.died_at)[:limit]

    def among(self, group: str, message_ids: Collection[str]) -> set[str]:
        """Return the message ids that have a letter. All of them if there are more letters than can be listed."""
        counts = self.count(group)
        if not counts:
            return set()
        if max(counts.values()) > MOST_AT_ONCE:
            return set(message_ids)
        return {letter.message_id for letter in self.read(group, sum(counts.values()))}.intersection(message_ids)

    def replay(self, group: str, ids: Collection[str]) -> set[str]:
        """Put letters back into their group's queue, with deliveries counted from 1. Return the ids of those that were there."""

        def copy(one: QueuedLetter) -> Publication:
            return Publication("", queue_name(one.letter.topic, group), copy_of(one.delivery, delivery_count=0))

        return self._settle(group, ids, copy)

    def discard(self, group: str, ids: Collection[str]) -> set[str]:
        """Delete letters. Return the ids of those that were there."""
        return self._settle(group, ids, None)

    def _settle(self, group: str, ids: Collection[str], copy: Callable[[QueuedLetter], Publication] | None) -> set[str]:
        """Take letters out of their queues; publish a copy of each before, in portions, so that few are in memory."""
        settled: set[str] = set()
        for topic in self._topics:
            left = {one for one in ids if one.startswith(f"{topic}/")}
            for window in WINDOWS:
                if not left:
                    break
                with self._reading(group, topic, window) as reader:
                    tags: list[int] = []
                    copies: list[Publication] = []
                    for one in (_read(group, topic, message) for message in reader.messages()):
                        if one.letter.id not in left:
                            continue
                        left.remove(one.letter.id)
                        settled.add(one.letter.id)
                        tags.append(one.tag)
                        if copy is not None:
                            copies.append(copy(one))
                        if not left:
                            break
                        if len(copies) == PORTION:
                            self._publish(copies)
                            reader.acknowledge(tags)
                            tags, copies = [], []
                    self._publish(copies)
                    reader.acknowledge(tags)
                if reader.has_read_all:
                    break
        return settled

    @contextmanager
    def _reading(self, group: str, topic: str, window: int) -> Iterator[_Reader]:
        """Yield the reader of a queue. What it does not acknowledge goes back when the block ends."""
        queue = dead_queue_name(topic, group)
        deadline = time.monotonic() + TURN_SECONDS
        while True:
            with self._asking("show the dead letters") as channel:
                pause = LOOK_SECONDS * random.uniform(3, 6)  # noqa: S311
                count = _count(channel, queue, deadline, pause)
                reader = _Reader(channel, queue, count, window)
                if not count or reader.subscribe():
                    yield reader
                    for _ in reader.messages():  # what is on its way, which py-amqp would log at the closing of the channel
                        pass
                    return
            if time.monotonic() > deadline:  # another process subscribed at the same moment, again and again
                raise _in_use(queue)


class _Reader:
    """
    Receives letters from a queue, which stay in it unless they are acknowledged.

    Args:
        count: the number of letters in the queue.
        window: the maximum number of letters that are received and not acknowledged.
    """

    def __init__(self, channel: amqp.Channel, queue: str, count: int, window: int) -> None:
        self.has_read_all = True  # False: the window was full
        self._channel = channel
        self._queue = queue
        self._left = count
        self._window = window
        self._arrived: deque[amqp.Message] = deque()
        self._has_come = False
        self._held = 0

    def subscribe(self) -> bool:
        """Wait for the first letter. False: the queue is empty by now, or another process has it."""
        self._channel.tx_select()
        self._channel.basic_qos(0, self._window, False)
        self._channel.basic_consume(self._queue, callback=self._arrived.append)
        return self._wait()

    def messages(self) -> Iterator[amqp.Message]:
        """Yield letters until the window is full, or there are no more."""
        while self._left > 0:
            if self._held >= self._window:
                self.has_read_all = False
                return
            if not self._arrived and not self._wait():
                return
            self._left -= 1
            self._held += 1
            yield self._arrived.popleft()

    def acknowledge(self, tags: Collection[int]) -> None:
        """
        Take letters out of the queue.

        The acknowledgments of a transaction are one command for the queue. Single ones would wait in the server once there are
        more than 32 (`quorum_commands_soft_limit`), and would be lost when the channel is closed: the letters would come back.
        """
        if tags:
            for tag in tags:
                self._channel.basic_ack(tag)
            self._channel.tx_commit()
            self._held -= len(tags)

    def _wait(self) -> bool:
        """Return whether a letter has come; False: the server has no more for this process."""
        deadline = time.monotonic() + TURN_SECONDS
        while not self._arrived:
            try:
                self._channel.connection.heartbeat_tick()
                self._channel.connection.drain_events(timeout=QUIET_SECONDS)
            except TimeoutError:
                ready, _ = state_of(self._channel, self._queue) or (0, 0)
                if not self._arrived and (ready == 0 or not self._has_come):
                    return False
                if time.monotonic() > deadline:
                    raise TimeoutError(f"queue {self._queue!r} has {ready} letters and delivers none") from None
        self._has_come = True
        return True


def _count(channel: amqp.Channel, queue: str, deadline: float, pause: float) -> int:
    """
    Return the number of letters in a queue when no process has them; 0 if there is no such queue.

    Args:
        pause: seconds between two looks.

    Raises:
        BrokerUnavailable: a process has them until the deadline.
    """
    while True:
        ready, consumers = state_of(channel, queue) or (0, 0)
        if not consumers:
            return ready
        if time.monotonic() > deadline:
            raise _in_use(queue)
        time.sleep(pause)


def _read(group: str, topic: str, message: amqp.Message) -> QueuedLetter:
    headers = message.properties.get("application_headers") or {}
    delivery = to_delivery(message, group=group, topic=topic, receipt="")
    delivery_count = max(1, count_noted(headers))  # x-delivery-count counts looks, too
    if died_at := time_of(headers.get(DIED_AT)):
        reason = str(headers.get(REASON, ""))
    else:
        died_at, reason = _death_of(headers)
    name, tag = f"{topic}/{delivery.message_id}/{micros_of(died_at)}", message.delivery_info["delivery_tag"]
    source = delivery.headers.get(Header.SOURCE, "")
    return QueuedLetter(
        BrokerDeadLetter(name, group, topic, delivery.message_id, reason, delivery_count, died_at, source), delivery, tag
    )


def _death_of(headers: dict[str, Any]) -> tuple[datetime, str]:
    """Return when and why RabbitMQ gave a message up."""
    deaths = headers.get("x-death") or [{}]
    at = deaths[0].get("time")
    why = str(deaths[0].get("reason", "unknown"))
    died_at = at.replace(tzinfo=UTC) if isinstance(at, datetime) else datetime.fromtimestamp(0, UTC)
    return died_at, REASONS.get(why, f"RabbitMQ gave it up: {why}.")
