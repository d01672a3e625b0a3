"""
Receives for consumer groups. The server keeps a request open while nothing comes, for 5 s at least, so a call may take
that long.

Where one of several topics has messages, the requests for the others stay open, and what they bring is the next call's;
unless half its time is over by then, when it is given back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import grpc

from outbox.brokers.base import Delivery
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.endpoints import Endpoint
from outbox.brokers.rocketmq.envelope import is_for, open_delivery
from outbox.brokers.rocketmq.errors import StatusError, describe
from outbox.brokers.rocketmq.session import Session, settings_of
from outbox.brokers.rocketmq.settlement import Finishing, group_name
from outbox.brokers.rocketmq.stubs import Code, definition, service
from outbox.errors import BrokerUnavailable
from outbox.message import TopicSpec, TopicType

LEAST_WAIT_SECONDS = 5.0  # of the server: grpcClientConsumerMinLongPollingTimeoutMillis
SESSION_SECONDS = 10.0
MOST_AT_ONCE = 32
FIFO_REQUESTS = 8  # at once, each for one message: a key's next message is not handed out with the one before

# Topic -> expression.
Subscriptions = Mapping[str, str]

# The server's group, topic, tags, and which of several requests it is.
Subject = tuple[str, str, frozenset[str] | None, int]


@dataclass(slots=True)
class Poll:
    """A request for messages that is open, or that has brought some."""

    task: asyncio.Task[list[Delivery]]
    hold_seconds: float


class Reading:
    """Receives over one link."""

    def __init__(self, link: Client, topics: Mapping[str, TopicSpec], finishing: Finishing) -> None:
        self._client = link
        self._finishing = finishing
        self._topics = topics
        self._polls: dict[Subject, Poll] = {}
        self._kept: list[tuple[float, Delivery]] = []  # give back at, delivery
        self._sessions: dict[tuple[str, str], tuple[Subscriptions, Session]] = {}
        self._subscribed: dict[str, Subscriptions] = {}
        self._interrupted = asyncio.Event()

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """Take messages, waiting so long for the first. Raises BrokerUnavailable."""
        return self._client.run(self._receive(group, topics, limit, invisible_for.total_seconds(), wait.total_seconds()))

    async def _receive(
        self,
        group: str,
        topics: Collection[str],
        limit: int,
        hold_seconds: float,
        wait_seconds: float,
    ) -> list[Delivery]:
        await self._return_stale()
        if taken := self._take(group, topics, limit):
            return taken
        self._subscribe(group, topics)
        subjects = [subject for name in topics for subject in self._subjects(group, name, None, limit)]
        waiting = {self._request(group, subject, limit, hold_seconds, wait_seconds) for subject in subjects}
        interrupted = asyncio.get_running_loop().create_task(self._interrupted.wait())
        while waiting and not taken and not self._interrupted.is_set():
            await asyncio.wait([*waiting, interrupted], return_when=asyncio.FIRST_COMPLETED)
            waiting = {task for task in waiting if not task.done()}
            self._collect(subjects)
            taken = self._take(group, topics, limit)
        interrupted.cancel()
        return taken

    def interrupt(self) -> None:
        """Have `receive` return what is there, and wait for nothing; from any thread."""
        self._client.call_soon(self._interrupted.set)

    def _subjects(self, group: str, topic: str, tags: frozenset[str] | None, limit: int) -> list[Subject]:
        """Say which requests a topic needs: those that are open, and of ordered topics more, for a message each."""
        most = min(limit, FIFO_REQUESTS) if self._is_ordered(topic) else 1
        numbered = [(group_name(group, self._topics[topic]), topic, tags, number) for number in range(FIFO_REQUESTS)]
        found = [subject for subject in numbered if subject in self._polls]
        free = [subject for subject in numbered if subject not in self._polls]
        return found + free[: max(0, most - len(found))]

    def _request(
        self, group: str, subject: Subject, limit: int, hold_seconds: float, wait_seconds: float
    ) -> asyncio.Task[list[Delivery]]:
        """Give the open request for a subject, made where there is none."""
        if subject not in self._polls:
            most = 1 if self._is_ordered(subject[1]) else min(limit, MOST_AT_ONCE)
            polling = self._poll(group, subject, most, hold_seconds, wait_seconds)
            self._polls[subject] = Poll(asyncio.get_running_loop().create_task(polling), hold_seconds)
        return self._polls[subject].task

    def _take(self, group: str, topics: Collection[str], limit: int) -> list[Delivery]:
        taken = [kept for kept in self._kept if kept[1].group == group and kept[1].topic in topics][:limit]
        self._kept = [kept for kept in self._kept if kept not in taken]
        return [delivery for _, delivery in taken]

    def _collect(self, subjects: Sequence[Subject]) -> None:
        """Keep what finished requests have brought. Raises BrokerUnavailable for the first that failed."""
        trouble = None
        for subject in subjects:
            if subject in self._polls and self._polls[subject].task.done():
                poll = self._polls.pop(subject)
                error = poll.task.exception()
                if error is None:
                    give_back_at = time.monotonic() + poll.hold_seconds / 2
                    self._kept.extend((give_back_at, delivery) for delivery in poll.task.result())
                else:
                    trouble = trouble or error
        if trouble is not None:
            self._client.routes.doubt()
            raise BrokerUnavailable(f"RocketMQ gives no messages: {describe(trouble)}") from trouble

    async def _return_stale(self) -> None:
        now = time.monotonic()
        stale = [delivery for give_back_at, delivery in self._kept if give_back_at < now]
        self._kept = [kept for kept in self._kept if kept[0] >= now]
        for delivery in stale:
            with suppress(grpc.aio.AioRpcError, StatusError):
                await self._finishing.change(delivery, 0)

    async def _poll(self, group: str, subject: Subject, limit: int, hold_seconds: float, wait_seconds: float) -> list[Delivery]:
        server_group, topic, tags, _ = subject
        queues = await self._client.routes.of(topic)
        queue = queues[self._client.next_turn() % len(queues)]
        endpoint = queue.endpoint
        await self._introduce(endpoint, server_group)
        request = service.ReceiveMessageRequest(
            group=self._client.resource(server_group),
            message_queue=queue.proto,
            filter_expression=_expression(tags),
            batch_size=limit,
            auto_renew=False,
        )
        request.invisible_duration.FromMilliseconds(round(hold_seconds * 1000))
        request.long_polling_timeout.FromMilliseconds(max(1, round(wait_seconds * 1000)))
        found: list[Delivery] = []
        others: list[Delivery] = []  # dead letters that were replayed for another group
        stub = self._client.stub(endpoint)
        timeout = max(wait_seconds, LEAST_WAIT_SECONDS) + self._client.timeout
        async for answer in stub.ReceiveMessage(request, metadata=self._client.metadata(server_group), timeout=timeout):
            if answer.HasField("message"):
                (found if is_for(answer.message, group) else others).append(open_delivery(answer.message, group))
            elif answer.HasField("status") and answer.status.code not in (Code.OK, Code.MESSAGE_NOT_FOUND):
                raise StatusError(answer.status)
        for delivery in others:
            with suppress(grpc.aio.AioRpcError, StatusError):  # else it comes again, and is passed over again
                await self._finishing.finish(delivery)
        return found

    def _subscribe(self, group: str, topics: Collection[str]) -> None:
        """Note what each of the server's groups wants, all of it before the first request: a session announces it whole."""
        wanted: dict[str, dict[str, str]] = {}
        for topic in topics:
            server_group = group_name(group, self._topics[topic])
            wanted.setdefault(server_group, dict(self._subscribed.get(server_group, {})))[topic] = _text(None)
        self._subscribed.update(wanted)

    async def _introduce(self, endpoint: Endpoint, group: str) -> None:
        """Have the proxy know the group's subscriptions before it is asked for messages."""
        key = (endpoint.target, group)
        wanted = self._subscribed[group]
        announced, session = self._sessions.get(key, (None, None))
        if session is None or announced != wanted:
            if session is not None:
                session.close()
            session = self._open_session(endpoint, group, wanted)
            self._sessions[key] = wanted, session
        if not await session.wait(SESSION_SECONDS):
            raise ConnectionError(f"the proxy did not answer in {SESSION_SECONDS} s; is there a consumer group {group!r}?")

    def _open_session(self, endpoint: Endpoint, group: str, subscriptions: Subscriptions) -> Session:
        settings = settings_of(self._client, endpoint, definition.ClientType.SIMPLE_CONSUMER)
        settings.subscription.group.CopyFrom(self._client.resource(group))
        for name, expression in subscriptions.items():
            settings.subscription.subscriptions.add(
                topic=self._client.resource(name),
                expression=definition.FilterExpression(type=definition.FilterType.TAG, expression=expression),
            )
        settings.subscription.long_polling_timeout.FromMilliseconds(round(LEAST_WAIT_SECONDS * 1000))
        heartbeat = service.HeartbeatRequest(
            group=self._client.resource(group), client_type=definition.ClientType.SIMPLE_CONSUMER
        )
        return Session(self._client, endpoint, settings, heartbeat, lambda *_: None, role=group)

    @property
    def is_used(self) -> bool:
        """Whether anything was asked for."""
        return bool(self._polls or self._kept)

    def close(self) -> None:
        """Give back what was received and not taken."""
        self._client.run(self._give_back())

    async def _give_back(self) -> None:
        for poll in self._polls.values():
            poll.task.cancel()
        works = [self._finishing.change(delivery, 0) for _, delivery in self._kept]
        await asyncio.gather(*works, return_exceptions=True)  # where that fails, they come again when their time is over

    def _is_ordered(self, topic: str) -> bool:
        return self._topics[topic].type is TopicType.FIFO


def _text(tags: frozenset[str] | None) -> str:
    return "*" if tags is None else " || ".join(sorted(tags))


def _expression(tags: frozenset[str] | None) -> Any:
    return definition.FilterExpression(type=definition.FilterType.TAG, expression=_text(tags))
