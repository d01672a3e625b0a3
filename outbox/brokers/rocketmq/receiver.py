"""
Receives messages for consumer groups, by long polling.

The server keeps a request without messages open for at least 5 s, so a call may take that long. A request reads from one broker,
so each broker of a topic gets a separate request. When one request returns messages, the others stay open, and their messages are
buffered for the next call. A buffered message that no call has taken for half of its invisible duration is returned to the
server.

A topic or broker that fails does not affect the others, and is polled again after RETRY_SECONDS.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import msgspec

from outbox.brokers.base import Delivery
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.codec import to_delivery
from outbox.brokers.rocketmq.endpoints import Queue
from outbox.brokers.rocketmq.errors import StatusError, describe, is_outage
from outbox.brokers.rocketmq.settlement import Settlement, group_name, invisible_milliseconds
from outbox.brokers.rocketmq.stubs import Code, service
from outbox.brokers.rocketmq.subscriptions import ALL_TAGS, MIN_WAIT_SECONDS, Subscriptions
from outbox.errors import BrokerUnavailable
from outbox.logs import get_logger
from outbox.message import TopicSpec, TopicType

logger = get_logger(__name__)

MAX_BATCH_SIZE = 32
FIFO_REQUESTS = 8  # concurrent requests of one message each, since two messages of a key must not be delivered together
RETRY_SECONDS = 2.0  # a failed request is made again after this time

NO_BROKER = ""  # instead of a broker's name, in the key of a request that only reads the topic's route

Poll = asyncio.Task[None]


class PollKey(NamedTuple):
    """
    Identifies a request.

    Args:
        number: distinguishes concurrent requests to the same broker.
    """

    server_group: str
    topic: str
    broker: str
    number: int


class ReceiveRequest(msgspec.Struct, frozen=True):
    """The arguments of one call of `receive`."""

    group: str
    topics: Collection[str]
    limit: int
    invisible_for: timedelta
    wait_seconds: float


class PollFailure(msgspec.Struct):
    """The error of a request. `retry_at`: when the request may be made again, by the monotonic clock."""

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
        self._brokers: dict[str, list[str]] = {}  # topic -> names of its brokers
        self._polls: dict[PollKey, Poll] = {}
        # Deliveries that no call has returned yet, each with the time at which it goes back to the server, by `monotonic`.
        self._buffered: list[tuple[float, Delivery]] = []
        self._failures: dict[PollKey, PollFailure] = {}
        self._return_timer: asyncio.TimerHandle | None = None
        self._is_interrupted = False
        self._interruption = asyncio.Event()

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """Receive messages; wait until there is one. Raises BrokerUnavailable if all topics fail."""
        return self._client.run(self._receive(ReceiveRequest(group, topics, limit, invisible_for, wait.total_seconds())))

    def interrupt(self) -> None:
        """End the wait of the current `receive` and of all later ones. May be called from any thread."""
        self._is_interrupted = True
        self._client.call_soon(self._interruption.set)

    async def _receive(self, call: ReceiveRequest) -> list[Delivery]:
        if taken := self._take_buffered(call):
            return taken
        self._subscriptions.add(call.group, call.topics)
        keys = self._keys(call)
        # Make the requests that need not wait before a retry. If all would have to, make all: the caller has waited already.
        polls = {key: self._ensure_poll(call, key) for key in {key for key in keys if self._is_due(key)} or keys}
        retries: set[Poll] = set()
        interruption = asyncio.get_running_loop().create_task(self._interruption.wait())
        try:
            while not taken and not self._is_interrupted:
                due = [key for key in self._keys(call) if self._is_due(key)]
                known = {(key.topic, key.broker) for key in polls}
                # Brokers that have become known during this call are polled, too.
                polls |= {key: self._ensure_poll(call, key) for key in due if (key.topic, key.broker) not in known}
                if not (waiting := {poll for poll in polls.values() if not poll.done()}):
                    break
                # Retries end the wait when they return, but do not prolong it: the next call may take their messages.
                retries |= {self._ensure_poll(call, key) for key in due if key in self._failures}
                pending = {*waiting, *(poll for poll in retries if not poll.done()), interruption}
                await asyncio.wait(pending, timeout=RETRY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                taken = self._take_buffered(call)
        finally:
            interruption.cancel()
        if not taken and (error := self._error_if_all_failed(polls)):
            raise BrokerUnavailable(f"No messages can be received from RocketMQ: {describe(error)}") from error
        self._log_failures(call)
        return taken

    def _is_due(self, key: PollKey) -> bool:
        failure = self._failures.get(key)
        return failure is None or failure.retry_at <= time.monotonic()

    def _keys(self, call: ReceiveRequest) -> set[PollKey]:
        """
        Return the keys of a call's requests: one for each broker of a topic; on fifo topics several, of one message each.

        While the route of a topic is unknown, its only request reads the route.
        """
        poll_keys: set[PollKey] = set()
        for topic in call.topics:
            server_group = group_name(call.group, self._topics[topic])
            brokers = self._brokers.get(topic) or [NO_BROKER]
            is_parallel = self._is_ordered(topic) and brokers != [NO_BROKER]
            max_requests = math.ceil(min(call.limit, FIFO_REQUESTS) / len(brokers)) if is_parallel else 1
            for broker in brokers:
                numbered = [PollKey(server_group, topic, broker, number) for number in range(FIFO_REQUESTS)]
                running = [key for key in numbered if key in self._polls]
                free = [key for key in numbered if key not in self._polls]
                poll_keys.update(running + free[: max(0, max_requests - len(running))])
        return poll_keys

    def _ensure_poll(self, call: ReceiveRequest, key: PollKey) -> Poll:
        """Return the running request with this key, or make it."""
        if key not in self._polls:
            poll = asyncio.get_running_loop().create_task(self._poll(call, key))
            self._polls[key] = poll
            poll.add_done_callback(partial(self._on_poll_done, key))
        return self._polls[key]

    def _on_poll_done(self, key: PollKey, poll: Poll) -> None:
        """Record or clear the failure of a request."""
        del self._polls[key]
        if poll.cancelled():
            return
        if (error := poll.exception()) is not None:
            self._failures[key] = PollFailure(error, time.monotonic() + RETRY_SECONDS)
            self._client.routes.invalidate(key.topic)
        else:
            self._failures.pop(key, None)

    def _error_if_all_failed(self, polls: Mapping[PollKey, Poll]) -> BaseException | None:
        """Return the error of the first request if all of them have failed, otherwise None."""
        results = [(key.broker, poll.exception() if poll.done() else None) for key, poll in polls.items()]
        errors = [error for broker, error in results if broker != NO_BROKER or error is not None]
        return errors[0] if errors and None not in errors else None

    def _log_failures(self, call: ReceiveRequest) -> None:
        """Log one failure for each topic that has failures that are not logged yet."""
        for topic in call.topics:
            prefix = group_name(call.group, self._topics[topic]), topic
            failures = [failure for key, failure in self._failures.items() if key[:2] == prefix and not failure.is_logged]
            if failures:
                error = failures[0].error
                logger.warning(
                    "Group %s cannot receive messages of topic %s from RocketMQ; retrying: %s",
                    call.group,
                    topic,
                    describe(error),
                    exc_info=None if is_outage(error) else error,
                )
            for failure in failures:
                failure.is_logged = True

    def _take_buffered(self, call: ReceiveRequest) -> list[Delivery]:
        taken: list[Delivery] = []
        remaining: list[tuple[float, Delivery]] = []
        for return_at, delivery in self._buffered:
            if len(taken) < call.limit and delivery.group == call.group and delivery.topic in call.topics:
                taken.append(delivery)
            else:
                remaining.append((return_at, delivery))
        self._buffered = remaining
        return taken

    def _schedule_return(self) -> None:
        """Schedule the return of buffered messages that no call has taken by then."""
        if self._return_timer is not None:
            self._return_timer.cancel()
        if self._buffered:
            seconds = min(return_at for return_at, _ in self._buffered) - time.monotonic()
            self._return_timer = asyncio.get_running_loop().call_later(seconds, self._return_stale)

    def _return_stale(self) -> None:
        now = time.monotonic()
        if stale := [delivery for return_at, delivery in self._buffered if return_at <= now]:
            self._buffered = [entry for entry in self._buffered if entry[0] > now]
            self._client.start_task(self._settlement.return_deliveries(stale))
        self._schedule_return()

    async def _poll(self, call: ReceiveRequest, key: PollKey) -> None:
        """
        Make a request, and buffer the received messages, also those received before an error.

        A proxy aborts its answer at a message that it cannot convert, and the messages after that one stay invisible until their
        duration is over. So after a failure, messages are requested one by one.
        """
        server_group, topic, broker, _ = key
        queues = await self._client.routes.of(topic)
        self._update_brokers(topic, queues)
        if not queues:
            raise ConnectionError("the route that the proxy returned has no queue")
        if broker == NO_BROKER:
            return
        candidates = [queue for queue in queues if queue.broker == broker] or queues
        queue = candidates[self._client.next_index() % len(candidates)]
        await self._subscriptions.announce(queue.endpoint, server_group)
        request = service.ReceiveMessageRequest(
            group=self._client.resource(server_group),
            message_queue=queue.proto,
            filter_expression=ALL_TAGS,
            batch_size=1 if self._is_ordered(topic) or key in self._failures else min(call.limit, MAX_BATCH_SIZE),
            auto_renew=False,
        )
        request.invisible_duration.FromMilliseconds(invisible_milliseconds(call.invisible_for))
        request.long_polling_timeout.FromMilliseconds(max(1, round(call.wait_seconds * 1000)))
        received: list[Delivery] = []
        stub = self._client.stub(queue.endpoint)
        timeout = max(call.wait_seconds, MIN_WAIT_SECONDS) + self._client.timeout
        try:
            async for answer in stub.ReceiveMessage(request, metadata=self._client.metadata(server_group), timeout=timeout):
                if answer.HasField("message"):
                    received.append(to_delivery(answer.message, call.group))
                elif answer.HasField("status") and answer.status.code not in (Code.OK, Code.MESSAGE_NOT_FOUND):
                    raise StatusError(answer.status)
        finally:
            return_at = time.monotonic() + invisible_milliseconds(call.invisible_for) / 2000
            self._buffered.extend((return_at, delivery) for delivery in received)
            self._schedule_return()

    def _update_brokers(self, topic: str, queues: Collection[Queue]) -> None:
        """Record the brokers of a topic, and drop the failures of brokers that no longer serve it."""
        brokers = sorted({queue.broker for queue in queues})
        if brokers != self._brokers.get(topic):
            self._brokers[topic] = brokers
            self._failures = {
                key: failure for key, failure in self._failures.items() if key.topic != topic or key.broker in brokers
            }

    def close(self) -> None:
        """Return the buffered messages to the server. A second call does nothing."""
        if self._polls or self._buffered:
            self._client.run(self._return_all())

    async def _return_all(self) -> None:
        polls = list(self._polls.values())
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        buffered, self._buffered = self._buffered, []
        self._schedule_return()
        await self._settlement.return_deliveries([delivery for _, delivery in buffered])

    def _is_ordered(self, topic: str) -> bool:
        return self._topics[topic].type is TopicType.FIFO
