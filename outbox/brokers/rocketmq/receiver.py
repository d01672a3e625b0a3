"""
Receives messages for consumer groups, by long polling.

The server keeps an empty request open for at least 5 s, so a call may take that long. When one of several topics has messages,
the requests for the others stay open, and their messages are kept for the next call. Messages that no call has taken after half
of their invisible duration are returned to the server.

A topic that fails does not affect the others; it is polled again a moment later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import grpc

from outbox.brokers.base import Delivery
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.codec import is_for, to_delivery
from outbox.brokers.rocketmq.errors import StatusError, describe
from outbox.brokers.rocketmq.settlement import Settlement, group_name, invisible_milliseconds
from outbox.brokers.rocketmq.stubs import Code, service
from outbox.brokers.rocketmq.subscriptions import EVERYTHING, MIN_WAIT_SECONDS, Subscriptions
from outbox.errors import BrokerUnavailable
from outbox.logs import get_logger
from outbox.message import TopicSpec, TopicType

logger = get_logger(__name__)

MAX_BATCH_SIZE = 32
FIFO_REQUESTS = 8  # concurrent requests for one message each: a key's next message is not delivered together with the one before
RETRY_SECONDS = 2.0  # a topic that failed is polled again after this time

# The server's group, the topic, and the number of the request.
PollKey = tuple[str, str, int]

Poll = asyncio.Task[list[Delivery]]


@dataclass(frozen=True, slots=True)
class ReceiveRequest:
    """The arguments of one call of `receive`."""

    group: str
    topics: Collection[str]
    limit: int
    invisible_for: timedelta
    wait_seconds: float


@dataclass(slots=True)
class TopicFailure:
    """The error of a topic, when it is polled again (monotonic seconds), and whether the error has been logged."""

    error: BaseException
    retry_at: float
    is_logged: bool = False


class RocketMQReceiver:
    """Receives messages through one client."""

    def __init__(self, client: RocketMQClient, topics: Mapping[str, TopicSpec], settlement: Settlement) -> None:
        self._client = client
        self._settlement = settlement
        self._topics = topics
        self._subscriptions = Subscriptions(client, topics)
        self._polls: dict[PollKey, Poll] = {}
        self._buffered: list[tuple[float, Delivery]] = []  # return at, delivery
        self._failures: dict[tuple[str, str], TopicFailure] = {}  # by the server's group and topic
        self._return_timer: asyncio.TimerHandle | None = None
        self._is_interrupted = False
        self._interruption = asyncio.Event()

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """Receive messages, and wait for the first one. Raises BrokerUnavailable if all topics fail."""
        return self._client.run(self._receive(ReceiveRequest(group, topics, limit, invisible_for, wait.total_seconds())))

    def interrupt(self) -> None:
        """Ask `receive` to return without waiting. May be called from any thread."""
        self._is_interrupted = True
        self._client.call_soon(self._interruption.set)

    async def _receive(self, call: ReceiveRequest) -> list[Delivery]:
        if taken := self._take(call):
            return taken
        self._subscriptions.add(call.group, call.topics)
        asked = self._ask(call, self._first_topics(call))
        again: set[Poll] = set()
        interruption = asyncio.get_running_loop().create_task(self._interruption.wait())
        try:
            while not taken and not self._is_interrupted and (waiting := {poll for poll in asked if not poll.done()}):
                again |= self._ask(call, self._recovering_topics(call))
                open_ones = {*waiting, *(poll for poll in again if not poll.done()), interruption}
                await asyncio.wait(open_ones, timeout=RETRY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                taken = self._take(call)
        finally:
            interruption.cancel()
        failed = [error for poll in asked if poll.done() and (error := poll.exception()) is not None]
        if not taken and failed and len(failed) == len(asked):
            raise BrokerUnavailable(f"No messages can be received from RocketMQ: {describe(failed[0])}") from failed[0]
        self._log_failures(call)
        return taken

    def _first_topics(self, call: ReceiveRequest) -> Collection[str]:
        """Return the topics that are not waiting for a retry, or all of them if there is none: the caller waits between calls."""
        now = time.monotonic()
        failures = {topic: self._failure_of(call, topic) for topic in call.topics}
        return [topic for topic, one in failures.items() if one is None or one.retry_at <= now] or call.topics

    def _recovering_topics(self, call: ReceiveRequest) -> Collection[str]:
        """Return the failed topics that are due for a retry. Their messages are kept for the next call."""
        now = time.monotonic()
        failures = {topic: self._failure_of(call, topic) for topic in call.topics}
        return [topic for topic, one in failures.items() if one is not None and one.retry_at <= now]

    def _ask(self, call: ReceiveRequest, topics: Collection[str]) -> set[Poll]:
        """Return the open requests for topics; create missing ones."""
        return {self._request(call, key) for topic in topics for key in self._poll_keys(call, topic)}

    def _poll_keys(self, call: ReceiveRequest, topic: str) -> list[PollKey]:
        """Return the keys of a topic's requests: one request, or on fifo topics several for one message each."""
        most = min(call.limit, FIFO_REQUESTS) if self._is_ordered(topic) else 1
        numbered = [(group_name(call.group, self._topics[topic]), topic, number) for number in range(FIFO_REQUESTS)]
        found = [key for key in numbered if key in self._polls]
        free = [key for key in numbered if key not in self._polls]
        return found + free[: max(0, most - len(found))]

    def _request(self, call: ReceiveRequest, key: PollKey) -> Poll:
        if key not in self._polls:
            poll = asyncio.get_running_loop().create_task(self._poll(call, key))
            self._polls[key] = poll
            poll.add_done_callback(partial(self._on_poll_done, key, call.invisible_for))
        return self._polls[key]

    def _on_poll_done(self, key: PollKey, invisible_for: timedelta, poll: Poll) -> None:
        """Keep the received messages for half of their invisible duration, or note the failure of the topic."""
        del self._polls[key]
        if poll.cancelled():
            return
        server_group, topic, _ = key
        if (error := poll.exception()) is not None:
            self._note_failure(server_group, topic, error)
            return
        self._failures.pop((server_group, topic), None)
        if received := poll.result():
            return_at = time.monotonic() + invisible_milliseconds(invisible_for) / 2000
            self._buffered.extend((return_at, delivery) for delivery in received)
            self._schedule_return()

    def _note_failure(self, server_group: str, topic: str, error: BaseException) -> None:
        """Note the failure of a topic, which is polled again a moment later."""
        self._failures[server_group, topic] = TopicFailure(error, time.monotonic() + RETRY_SECONDS)
        self._client.routes.invalidate(topic)

    def _log_failures(self, call: ReceiveRequest) -> None:
        """Log the failures of topics that have not been logged."""
        for topic in call.topics:
            failure = self._failure_of(call, topic)
            if failure is not None and not failure.is_logged:
                failure.is_logged = True
                is_known_kind = isinstance(failure.error, (grpc.aio.AioRpcError, StatusError, ConnectionError))
                logger.warning(
                    "Group %s cannot receive messages of topic %s from RocketMQ; retrying: %s",
                    call.group,
                    topic,
                    describe(failure.error),
                    exc_info=None if is_known_kind else failure.error,
                )

    def _failure_of(self, call: ReceiveRequest, topic: str) -> TopicFailure | None:
        return self._failures.get((group_name(call.group, self._topics[topic]), topic))

    def _take(self, call: ReceiveRequest) -> list[Delivery]:
        taken: list[Delivery] = []
        left: list[tuple[float, Delivery]] = []
        for return_at, delivery in self._buffered:
            if len(taken) < call.limit and delivery.group == call.group and delivery.topic in call.topics:
                taken.append(delivery)
            else:
                left.append((return_at, delivery))
        self._buffered = left
        return taken

    def _schedule_return(self) -> None:
        """Schedule the return of kept messages that no call takes."""
        if self._return_timer is not None:
            self._return_timer.cancel()
        if self._buffered:
            seconds = min(return_at for return_at, _ in self._buffered) - time.monotonic()
            self._return_timer = asyncio.get_running_loop().call_later(seconds, self._return_unclaimed)

    def _return_unclaimed(self) -> None:
        now = time.monotonic()
        if stale := [delivery for return_at, delivery in self._buffered if return_at <= now]:
            self._buffered = [one for one in self._buffered if one[0] > now]
            self._client.start_task(self._settlement.return_deliveries(stale))
        self._schedule_return()

    async def _poll(self, call: ReceiveRequest, key: PollKey) -> list[Delivery]:
        server_group, topic, _ = key
        queues = await self._client.routes.of(topic)
        queue = queues[self._client.next_index() % len(queues)]
        await self._subscriptions.announce(queue.endpoint, server_group)
        request = service.ReceiveMessageRequest(
            group=self._client.resource(server_group),
            message_queue=queue.proto,
            filter_expression=EVERYTHING,
            batch_size=1 if self._is_ordered(topic) else min(call.limit, MAX_BATCH_SIZE),
            auto_renew=False,
        )
        request.invisible_duration.FromMilliseconds(invisible_milliseconds(call.invisible_for))
        request.long_polling_timeout.FromMilliseconds(max(1, round(call.wait_seconds * 1000)))
        found: list[Delivery] = []
        others: list[Delivery] = []  # dead letters that were replayed for another group
        stub = self._client.stub(queue.endpoint)
        timeout = max(call.wait_seconds, MIN_WAIT_SECONDS) + self._client.timeout
        async for answer in stub.ReceiveMessage(request, metadata=self._client.metadata(server_group), timeout=timeout):
            if answer.HasField("message"):
                is_mine = is_for(answer.message, call.group)
                (found if is_mine else others).append(to_delivery(answer.message, call.group))
            elif answer.HasField("status") and answer.status.code not in (Code.OK, Code.MESSAGE_NOT_FOUND):
                raise StatusError(answer.status)
        for delivery in others:
            with suppress(grpc.aio.AioRpcError, StatusError):  # on failure it is received and ignored again
                await self._settlement.ack_one(delivery)
        return found

    def close(self) -> None:
        """Return the kept messages to the server. A second call does nothing."""
        if self._polls or self._buffered:
            self._client.run(self._return_all())

    async def _return_all(self) -> None:
        polls = list(self._polls.values())
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        kept, self._buffered = self._buffered, []
        self._schedule_return()
        await self._settlement.return_deliveries([delivery for _, delivery in kept])

    def _is_ordered(self, topic: str) -> bool:
        return self._topics[topic].type is TopicType.FIFO
