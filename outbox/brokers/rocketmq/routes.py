"""
Which queues a topic has, and which proxies lead to them: asked of the proxy that settings name, and remembered.

What was known goes on while nobody can be asked: the proxies it names may be alive where the one that tells is not. So it does
where a topic is said to be missing: a topic whose brokers are away is missing, too.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import grpc

from outbox.brokers.rocketmq.endpoints import Queue
from outbox.brokers.rocketmq.errors import StatusError
from outbox.brokers.rocketmq.shared import SharedAttempts
from outbox.brokers.rocketmq.stubs import Code

ROUTE_SECONDS = 30.0
AGAIN_SECONDS = 2.0  # where nobody could be asked
MISSING_SECONDS = 600.0  # so long after it was last there a missing topic may be one whose brokers are away


class Routes:
    """
    Knows the routes of topics. In one loop only.

    Args:
        ask: gives a topic's queues, or raises.
        clock: gives seconds; it never goes back.
    """

    def __init__(self, ask: Callable[[str], Awaitable[list[Queue]]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._known: dict[str, tuple[float, list[Queue]]] = {}  # good until, queues
        self._seen_at: dict[str, float] = {}
        self._asking: SharedAttempts[list[Queue]] = SharedAttempts()

    async def of(self, topic: str) -> list[Queue]:
        """Return the queues of a topic; of those who want them at once, one asks."""
        known = self._known.get(topic)
        if known is not None and self._clock() < known[0]:
            return known[1]
        return await self._asking.join(topic, partial(self._find, topic))

    def doubt(self, topic: str | None = None) -> None:
        """Ask again at the next use: about one topic, or all."""
        for name in list(self._known) if topic is None else [topic]:
            if name in self._known:
                self._known[name] = 0.0, self._known[name][1]

    async def _find(self, topic: str) -> list[Queue]:
        try:
            queues = await self._ask(topic)
        except (grpc.aio.AioRpcError, StatusError) as error:
            if topic not in self._known or not self._may_be_away(topic, error):
                raise
            self._known[topic] = self._clock() + AGAIN_SECONDS, self._known[topic][1]
        else:
            self._known[topic] = self._clock() + ROUTE_SECONDS, queues
            self._seen_at[topic] = self._clock()
        return self._known[topic][1]

    def _may_be_away(self, topic: str, error: Exception) -> bool:
        if isinstance(error, StatusError):
            return error.code == Code.TOPIC_NOT_FOUND and self._clock() - self._seen_at[topic] < MISSING_SECONDS
        return True
