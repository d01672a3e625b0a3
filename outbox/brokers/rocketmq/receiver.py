"""
Receives for consumer groups. The server keeps a request open while nothing comes, for 5 s at least, so a call may take
that long.

Where one of several topics has messages, the requests for the others stay open, and what they bring is the next call's;
unless nobody has taken it when half its time is over: then it is handed back.

Trouble with a topic is that topic's: the others go on, and it is asked for again a moment later.
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
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.envelope import is_for, open_delivery
from outbox.brokers.rocketmq.errors import StatusError, describe
from outbox.brokers.rocketmq.settlement import Finishing, group_name, hidden_milliseconds
from outbox.brokers.rocketmq.stubs import Code, service
from outbox.brokers.rocketmq.subscriptions import EVERYTHING, LEAST_WAIT_SECONDS, Subscriptions
from outbox.errors import BrokerUnavailable
from outbox.logs import get_logger
from outbox.message import TopicSpec, TopicType

logger = get_logger(__name__)

MOST_AT_ONCE = 32
FIFO_REQUESTS = 8  # at once, each for one message: a key's next message is not handed out with the one before
AGAIN_SECONDS = 2.0  # a topic that failed is left alone for that long

# The server's group, topic, and which of several requests it is.
Subject = tuple[str, str, int]

Poll = asyncio.Task[list[Delivery]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one call of `receive` asks for."""

    group: str
    topics: Collection[str]
    limit: int
    invisible_for: timedelta
    wait_seconds: float


@dataclass(slots=True)
class Trouble:
    """What is wrong with a topic, until when it is left alone (monotonic seconds), and whether the log tells of it."""

    error: BaseException
    left_alone_until: float
    is_told: bool = False


class Reading:
    """Receives over one client."""

    def __init__(self, client: Client, topics: Mapping[str, TopicSpec], finishing: Finishing) -> None:
        self._client = client
        self._finishing = finishing
        self._topics = topics
        self._subscriptions = Subscriptions(client, topics)
        self._polls: dict[Subject, Poll] = {}
        self._kept: list[tuple[float, Delivery]] = []  # hand back at, delivery
        self._troubles: dict[tuple[str, str], Trouble] = {}  # by the server's group and topic
        self._returning: asyncio.TimerHandle | None = None
        self._is_interrupted = False
        self._interruption = asyncio.Event()

    def receive(
        self, group: str, topics: Collection[str], *, limit: int, invisible_for: timedelta, wait: timedelta
    ) -> list[Delivery]:
        """Take messages, waiting so long for the first. Raises BrokerUnavailable where nothing comes and all topics fail."""
        return self._client.run(self._receive(Wanted(group, topics, limit, invisible_for, wait.total_seconds())))

    def interrupt(self) -> None:
        """Ask `receive` to return what is there, and wait for nothing; from any thread."""
        self._is_interrupted = True
        self._client.call_soon(self._interruption.set)

    async def _receive(self, wanted: Wanted) -> list[Delivery]:
        if taken := self._take(wanted):
            return taken
        self._subscriptions.add(wanted.group, wanted.topics)
        asked = self._ask(wanted, self._first_topics(wanted))
        again: set[Poll] = set()
        interruption = asyncio.get_running_loop().create_task(self._interruption.wait())
        try:
            while not taken and not self._is_interrupted and (waiting := {poll for poll in asked if not poll.done()}):
                again |= self._ask(wanted, self._recovering_topics(wanted))
                open_ones = {*waiting, *(poll for poll in again if not poll.done()), interruption}
                await asyncio.wait(open_ones, timeout=AGAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                taken = self._take(wanted)
        finally:
            interruption.cancel()
        failed = [error for poll in asked if poll.done() and (error := poll.exception()) is not None]
        if not taken and failed and len(failed) == len(asked):
            raise BrokerUnavailable(f"RocketMQ gives no messages: {describe(failed[0])}") from failed[0]
        self._tell(wanted)
        return taken

    def _first_topics(self, wanted: Wanted) -> Collection[str]:
        """Return the topics that are not left alone; all where that is none: whoever calls waits between calls."""
        now = time.monotonic()
        troubles = {topic: self._trouble_with(wanted, topic) for topic in wanted.topics}
        return [topic for topic, one in troubles.items() if one is None or one.left_alone_until <= now] or wanted.topics

    def _recovering_topics(self, wanted: Wanted) -> Collection[str]:
        """Return the topics that were left alone for long enough. Nobody waits for them: what they bring is for the next call."""
        now = time.monotonic()
        troubles = {topic: self._trouble_with(wanted, topic) for topic in wanted.topics}
        return [topic for topic, one in troubles.items() if one is not None and one.left_alone_until <= now]

    def _ask(self, wanted: Wanted, topics: Collection[str]) -> set[Poll]:
        """Return the open requests for topics, made where there are none."""
        return {self._request(wanted, subject) for topic in topics for subject in self._subjects(wanted, topic)}

    def _subjects(self, wanted: Wanted, topic: str) -> list[Subject]:
        """Return which requests a topic needs: those that are open, and of ordered topics more, for a message each."""
        most = min(wanted.limit, FIFO_REQUESTS) if self._is_ordered(topic) else 1
        numbered = [(group_name(wanted.group, self._topics[topic]), topic, number) for number in range(FIFO_REQUESTS)]
        found = [subject for subject in numbered if subject in self._polls]
        free = [subject for subject in numbered if subject not in self._polls]
        return found + free[: max(0, most - len(found))]

    def _request(self, wanted: Wanted, subject: Subject) -> Poll:
        if subject not in self._polls:
            poll = asyncio.get_running_loop().create_task(self._poll(wanted, subject))
            self._polls[subject] = poll
            poll.add_done_callback(partial(self._arrive, subject, wanted.invisible_for))
        return self._polls[subject]

    def _arrive(self, subject: Subject, invisible_for: timedelta, poll: Poll) -> None:
        """Keep what a request has brought until half its time is over, or note what went wrong with its topic."""
        del self._polls[subject]
        if poll.cancelled():
            return
        server_group, topic, _ = subject
        if (error := poll.exception()) is not None:
            self._note(server_group, topic, error)
            return
        self._troubles.pop((server_group, topic), None)
        if brought := poll.result():
            hand_back_at = time.monotonic() + hidden_milliseconds(invisible_for) / 2000
            self._kept.extend((hand_back_at, delivery) for delivery in brought)
            self._plan_return()

    def _note(self, server_group: str, topic: str, error: BaseException) -> None:
        """Leave a topic alone for a moment."""
        known = self._troubles.get((server_group, topic))
        is_told = known is not None and known.is_told and describe(known.error) == describe(error)
        self._troubles[server_group, topic] = Trouble(error, time.monotonic() + AGAIN_SECONDS, is_told)
        self._client.routes.doubt(topic)

    def _tell(self, wanted: Wanted) -> None:
        """Log what is wrong with topics: once for as long as it stays the same."""
        for topic in wanted.topics:
            trouble = self._trouble_with(wanted, topic)
            if trouble is not None and not trouble.is_told:
                trouble.is_told = True
                is_known_kind = isinstance(trouble.error, (grpc.aio.AioRpcError, StatusError, ConnectionError))
                logger.warning(
                    "RocketMQ gives group %s no messages of topic %s, which is asked for again and again: %s",
                    wanted.group,
                    topic,
                    describe(trouble.error),
                    exc_info=None if is_known_kind else trouble.error,
                )

    def _trouble_with(self, wanted: Wanted, topic: str) -> Trouble | None:
        return self._troubles.get((group_name(wanted.group, self._topics[topic]), topic))

    def _take(self, wanted: Wanted) -> list[Delivery]:
        taken: list[Delivery] = []
        left: list[tuple[float, Delivery]] = []
        for hand_back_at, delivery in self._kept:
            if len(taken) < wanted.limit and delivery.group == wanted.group and delivery.topic in wanted.topics:
                taken.append(delivery)
            else:
                left.append((hand_back_at, delivery))
        self._kept = left
        return taken

    def _plan_return(self) -> None:
        """Hand what is kept back in time, where nobody takes it."""
        if self._returning is not None:
            self._returning.cancel()
        if self._kept:
            seconds = min(hand_back_at for hand_back_at, _ in self._kept) - time.monotonic()
            self._returning = asyncio.get_running_loop().call_later(seconds, self._return_stale)

    def _return_stale(self) -> None:
        now = time.monotonic()
        if stale := [delivery for hand_back_at, delivery in self._kept if hand_back_at <= now]:
            self._kept = [one for one in self._kept if one[0] > now]
            self._client.begin(self._finishing.give_back(stale))
        self._plan_return()

    async def _poll(self, wanted: Wanted, subject: Subject) -> list[Delivery]:
        server_group, topic, _ = subject
        queues = await self._client.routes.of(topic)
        queue = queues[self._client.next_turn() % len(queues)]
        await self._subscriptions.introduce(queue.endpoint, server_group)
        request = service.ReceiveMessageRequest(
            group=self._client.resource(server_group),
            message_queue=queue.proto,
            filter_expression=EVERYTHING,
            batch_size=1 if self._is_ordered(topic) else min(wanted.limit, MOST_AT_ONCE),
            auto_renew=False,
        )
        request.invisible_duration.FromMilliseconds(hidden_milliseconds(wanted.invisible_for))
        request.long_polling_timeout.FromMilliseconds(max(1, round(wanted.wait_seconds * 1000)))
        found: list[Delivery] = []
        others: list[Delivery] = []  # dead letters that were replayed for another group
        stub = self._client.stub(queue.endpoint)
        timeout = max(wanted.wait_seconds, LEAST_WAIT_SECONDS) + self._client.timeout
        async for answer in stub.ReceiveMessage(request, metadata=self._client.metadata(server_group), timeout=timeout):
            if answer.HasField("message"):
                mine = is_for(answer.message, wanted.group)
                (found if mine else others).append(open_delivery(answer.message, wanted.group))
            elif answer.HasField("status") and answer.status.code not in (Code.OK, Code.MESSAGE_NOT_FOUND):
                raise StatusError(answer.status)
        for delivery in others:
            with suppress(grpc.aio.AioRpcError, StatusError):  # otherwise it is received again, and ignored again
                await self._finishing.finish(delivery)
        return found

    def close(self) -> None:
        """Hand back what was received and not taken. A second call does nothing."""
        if self._polls or self._kept:
            self._client.run(self._give_back())

    async def _give_back(self) -> None:
        polls = list(self._polls.values())
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        kept, self._kept = self._kept, []
        self._plan_return()
        await self._finishing.give_back([delivery for _, delivery in kept])

    def _is_ordered(self, topic: str) -> bool:
        return self._topics[topic].type is TopicType.FIFO
