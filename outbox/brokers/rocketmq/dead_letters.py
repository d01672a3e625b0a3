"""
The server's dead-letter queues: after `retryMaxTimes` redeliveries the server moves a message to the topic `%DLQ%<group>`.

These messages are read over the remoting protocol, from the group's offset in that topic on. An acknowledgement moves the offset
to the first unacknowledged message. Received messages do not become invisible, so two processes may receive the same one; the
group's database stores it once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from outbox.brokers.base import Delivery
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.codec import stored_delivery
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import RemotingAnswer, RemotingError, Request, StoredMessage
from outbox.errors import BrokerUnavailable
from outbox.logs import get_logger, log_fields

logger = get_logger(__name__)

RETRY_SECONDS = 60.0  # nothing is read for this time after a broker did not answer

DLQ_PREFIX, RETRY_PREFIX = "%DLQ%", "%RETRY%"

NO_OFFSET_CODES = {requests.NOTHING_FOUND, requests.NO_SUCH_TOPIC, requests.NO_SUCH_GROUP}
# Answers to a pull that count as an empty queue: the server creates the topic when it first moves a message there, and without a
# permission nothing can be read.
EMPTY_CODES = {requests.NO_SUCH_TOPIC, requests.NO_SUCH_GROUP, requests.NO_PERMISSION}


class DeadLetterQueue(NamedTuple):
    """The only queue that the topic `%DLQ%<group>` has on a broker (host:port)."""

    broker: str
    server_group: str

    @property
    def topic(self) -> str:
        return DLQ_PREFIX + self.server_group


class DeadLetterReader:
    """
    Reads the server's dead-letter queues, through one client.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, client: RocketMQClient, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._retry_at = float("-inf")
        # The offset of the first unacknowledged message, and the offsets of messages that are acknowledged.
        self._first_unacked: dict[DeadLetterQueue, int] = {}
        self._acked: dict[DeadLetterQueue, set[int]] = {}

    def receive(self, group: str, server_groups: Collection[str], topics: Collection[str], limit: int) -> list[Delivery]:
        """
        Return up to `limit` unacknowledged messages of the given topics.

        After a broker did not answer, this returns nothing for RETRY_SECONDS. Consumers continue meanwhile, since they receive
        and settle all other messages through a proxy.
        """
        if self._clock() < self._retry_at:
            return []
        try:
            messages = self._client.run(self._read_all(server_groups, topics, limit))
        except (RemotingError, ConnectionError) as error:
            self._retry_at = self._clock() + RETRY_SECONDS
            logger.warning(
                "The dead-letter queues of group %r cannot be read; retrying in %.0f s: %s",
                group,
                RETRY_SECONDS,
                error,
                extra=log_fields(group=group),
            )
            return []
        return [
            stored_delivery(
                stored,
                group=group,
                topic=_original_topic(queue, stored),
                receipt=f"{queue.broker} {queue.server_group} {stored.queue_offset}",
                dead_letter_reason=f"RocketMQ moved it to {queue.topic} (retryMaxTimes).",
            )
            for queue, stored in messages
        ]

    def count(self, server_groups: Collection[str], topics: Collection[str]) -> dict[str, int]:
        """Return the number of unacknowledged messages by topic. Raises BrokerUnavailable."""
        with _raise_unavailable():
            messages = self._client.run(self._read_all(server_groups, topics, None))
        return dict(Counter(_original_topic(*message) for message in messages))

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge messages. Raises BrokerUnavailable."""
        with _raise_unavailable():
            self._client.run(self._ack(deliveries))

    async def _read_all(
        self, server_groups: Collection[str], topics: Collection[str], limit: int | None
    ) -> list[tuple[DeadLetterQueue, StoredMessage]]:
        messages: list[tuple[DeadLetterQueue, StoredMessage]] = []
        for broker in await self._client.brokers():
            for queue in [DeadLetterQueue(broker, server_group) for server_group in sorted(server_groups)]:
                offset = await self._read_offset(queue)
                while offset is not None and (limit is None or len(messages) < limit):
                    pulled, offset = await self._pull(queue, offset)
                    messages += [(queue, stored) for stored in pulled if _original_topic(queue, stored) in topics]
        return messages[:limit]

    async def _read_offset(self, queue: DeadLetterQueue) -> int | None:
        """Return the group's offset in a queue. None: the broker denies access to it."""
        self._first_unacked.pop(queue, None)
        answer = await self._ask(queue, requests.offset_of(queue.server_group, queue.topic))
        if answer.code == requests.NO_PERMISSION:
            return None
        return 0 if answer.code in NO_OFFSET_CODES else int(answer.checked().fields["offset"])

    async def _pull(self, queue: DeadLetterQueue, offset: int) -> tuple[list[StoredMessage], int | None]:
        """Return the unacknowledged messages from an offset on, and the next offset; None at the end of the queue."""
        answer = await self._ask(queue, requests.pull(queue.topic, 0, offset, group=queue.server_group))
        if answer.code in EMPTY_CODES:
            return [], None
        messages, next_offset = requests.pulled(answer)
        if messages and queue not in self._first_unacked:
            first = self._first_unacked[queue] = messages[0].queue_offset
            self._acked[queue] = {acked for acked in self._acked.get(queue, ()) if acked >= first}
        return (
            [stored for stored in messages if stored.queue_offset not in self._acked[queue]],
            next_offset if next_offset > offset else None,
        )

    async def _ask(self, queue: DeadLetterQueue, request: Request) -> RemotingAnswer:
        """Send a request about a queue. A missing permission is only logged, since consumers must continue without it."""
        answer = await self._client.remoting.ask(queue.broker, request)
        if answer.code == requests.NO_PERMISSION:
            logger.warning(
                "A dead-letter queue of broker %s is not read: grant ACCESS_KEY Get and Sub on Topic:%s and Group:%s (ACL 2.0).",
                queue.broker,
                queue.topic,
                queue.server_group,
            )
        return answer

    async def _ack(self, deliveries: Sequence[Delivery]) -> None:
        queues: set[DeadLetterQueue] = set()
        for delivery in deliveries:
            broker, server_group, offset = delivery.receipt.split(" ")
            queues.add(queue := DeadLetterQueue(broker, server_group))
            self._acked.setdefault(queue, set()).add(int(offset))
        for queue in queues & self._first_unacked.keys():
            first = self._first_unacked[queue]
            while first in self._acked[queue]:
                first += 1
            if first > self._first_unacked[queue]:
                request = requests.move_offset(queue.server_group, queue.topic, first)
                (await self._client.remoting.ask(queue.broker, request)).checked()
                self._first_unacked[queue] = first


def _original_topic(queue: DeadLetterQueue, stored: StoredMessage) -> str:
    """Return the topic that a message was sent to. RETRY_TOPIC may have the retry topic instead, `%RETRY%<group>_<topic>`."""
    return stored.properties.get("RETRY_TOPIC", stored.topic).removeprefix(f"{RETRY_PREFIX}{queue.server_group}_")


@contextmanager
def _raise_unavailable() -> Iterator[None]:
    try:
        yield
    except (RemotingError, ConnectionError) as error:
        raise BrokerUnavailable(f"RocketMQ's dead-letter queues cannot be counted or acknowledged: {error}") from error
