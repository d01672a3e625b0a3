"""The base class of the two senders of half messages: it makes concurrent requests, which a subclass sends, up to a deadline."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from outbox.brokers.base import Ended, HalfRef, HalfStatus, Outgoing, SendResult
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.codec import half_id
from outbox.brokers.rocketmq.sender import NOT_STARTED, SEND_SECONDS
from outbox.message import Resolution, TopicSpec

ENDED = {Resolution.COMMIT: Ended.COMMITTED, Resolution.ROLLBACK: Ended.ROLLED_BACK}


class HalfSender(abc.ABC):
    """
    Sends and ends half messages through one client. To end a half message is to commit it or roll it back.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, client: RocketMQClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock

    def send(self, messages: Sequence[Outgoing], topics: Sequence[TopicSpec]) -> list[SendResult]:
        """Send each half message once."""
        deadline = self._clock() + SEND_SECONDS

        async def send_one(pair: tuple[Outgoing, TopicSpec]) -> SendResult:
            if self._clock() >= deadline:
                return NOT_STARTED
            message, topic = pair
            return await self._send(message, topic, message.half_id or half_id(message.message_id))

        pairs = list(zip(messages, topics, strict=True))
        return self._client.run(self._client.pipelined(pairs, send_one))

    def end(self, halves: Sequence[HalfRef], resolution: Resolution, within: timedelta | None) -> list[SendResult]:
        """Commit or roll back half messages. Each request is sent once, within the given time."""
        deadline = float("inf") if within is None else self._clock() + within.total_seconds()

        async def end_one(half: HalfRef) -> SendResult:
            return await self._end(half, resolution, deadline)

        return self._client.run(self._client.pipelined(halves, end_one))

    @abc.abstractmethod
    def look_up(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        """Return the status of each half message; UNKNOWN if it cannot be looked up."""

    @abc.abstractmethod
    async def _send(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> SendResult:
        """Send a half message under the given id."""

    @abc.abstractmethod
    async def _end(self, half: HalfRef, resolution: Resolution, deadline: float) -> SendResult:
        """End a half message with a request that is sent before the deadline (by the clock), or return TOO_LATE."""
