"""Sends and ends half messages, many requests under way at once; which way they go is a subclass's."""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from outbox.brokers.base import Ended, HalfRef, HalfStatus, Outgoing, SendResult
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.envelope import half_id
from outbox.brokers.rocketmq.pipelines import pipelined
from outbox.brokers.rocketmq.producer import NOT_BEGUN, SEND_SECONDS
from outbox.message import Resolution, TopicSpec

ENDED = {Resolution.COMMIT: Ended.COMMITTED, Resolution.ROLLBACK: Ended.ROLLED_BACK}


class HalfSender(abc.ABC):
    """
    Sends and ends half messages over one client.

    Args:
        clock: gives seconds; it never goes back.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock

    def send(self, messages: Sequence[Outgoing], topics: Sequence[TopicSpec]) -> list[SendResult]:
        """Store half messages, each once."""
        deadline = self._clock() + SEND_SECONDS

        async def send_one(pair: tuple[Outgoing, TopicSpec]) -> SendResult:
            if self._clock() >= deadline:
                return NOT_BEGUN
            message, topic = pair
            return await self._send(message, topic, message.half_id or half_id(message.message_id))

        pairs = list(zip(messages, topics, strict=True))
        return self._client.run(pipelined(pairs, send_one, at_once=self._client.options.in_flight))

    def end(self, halves: Sequence[HalfRef], resolution: Resolution, within: timedelta | None) -> list[SendResult]:
        """Commit or roll back; each request leaves once, and none later than that."""
        deadline = float("inf") if within is None else self._clock() + within.total_seconds()

        async def end_one(half: HalfRef) -> SendResult:
            return await self._end(half, resolution, deadline)

        return self._client.run(pipelined(halves, end_one, at_once=self._client.options.in_flight))

    @abc.abstractmethod
    def look_up(self, halves: Sequence[HalfRef]) -> list[HalfStatus]:
        """Return where each half message stands; what cannot be asked is UNKNOWN."""

    @abc.abstractmethod
    async def _send(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> SendResult:
        """Store a half message under that id."""

    @abc.abstractmethod
    async def _end(self, half: HalfRef, resolution: Resolution, deadline: float) -> SendResult:
        """End a half message, by a request that leaves before that time of the clock."""
