"""
The routes of topics: their queues, and the proxies that serve them. Routes are queried from the proxy in settings, and cached.

A cached route stays in use while queries get no answer, since the proxies of that route may still work. It also stays in use if a
proxy answers that there is no such topic, until the topic was last found MISSING_SECONDS ago: a proxy gives the same answer while
the topic's brokers are down.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import grpc

from outbox.brokers.rocketmq.endpoints import Queue
from outbox.brokers.rocketmq.errors import StatusError
from outbox.brokers.rocketmq.singleflight import SingleFlight
from outbox.brokers.rocketmq.stubs import Code

ROUTE_SECONDS = 30.0
RETRY_SECONDS = 2.0  # the time from a failed query to the next one
MISSING_SECONDS = 600.0  # for this time after it was last found, a topic that is not found may be on brokers that are down


class Routes:
    """
    Caches the routes of topics. Use it only in one event loop.

    Args:
        query: returns a topic's queues, or raises.
        clock: a monotonic clock in seconds.
    """

    def __init__(self, query: Callable[[str], Awaitable[list[Queue]]], clock: Callable[[], float] = time.monotonic) -> None:
        self._query = query
        self._clock = clock
        self._known: dict[str, tuple[float, list[Queue]]] = {}  # topic -> valid until, queues
        self._seen_at: dict[str, float] = {}
        self._queries: SingleFlight[list[Queue]] = SingleFlight()

    async def of(self, topic: str) -> list[Queue]:
        """Return the queues of a topic. Concurrent callers share one query."""
        known = self._known.get(topic)
        if known is not None and self._clock() < known[0]:
            return known[1]
        return await self._queries.join(topic, partial(self._find, topic))

    def invalidate(self, topic: str | None = None) -> None:
        """Query the route of a topic, or of all topics, again at its next use."""
        for name in list(self._known) if topic is None else [topic]:
            if name in self._known:
                self._known[name] = 0.0, self._known[name][1]

    def was_seen(self, topic: str) -> bool:
        """Return whether a topic was found recently. If so, and it is not found now, its brokers may be down."""
        return topic in self._seen_at and self._clock() - self._seen_at[topic] < MISSING_SECONDS

    async def _find(self, topic: str) -> list[Queue]:
        try:
            queues = await self._query(topic)
        except (grpc.aio.AioRpcError, StatusError) as error:
            is_gone = isinstance(error, StatusError) and not (error.code == Code.TOPIC_NOT_FOUND and self.was_seen(topic))
            if topic not in self._known or is_gone:
                raise
            self._known[topic] = self._clock() + RETRY_SECONDS, self._known[topic][1]
        else:
            self._known[topic] = self._clock() + ROUTE_SECONDS, queues
            self._seen_at[topic] = self._clock()
        return self._known[topic][1]
