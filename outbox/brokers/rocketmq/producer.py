"""
Sends and ends, pipelined: some requests wait for their answers at once, each message goes out once.

THE WINDOW. A COMMIT that meets a check of the server's makes a second copy, and checks begin `transactionTimeOut` after
the half message. So a half message is committed only within the window from its own send; later the check-back has the
word. And no half message is sent any more once half the window is over: it would find no time to be committed.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from outbox.brokers.base import Ended, HalfRef, Outgoing, SendResult, SendStatus
from outbox.brokers.rocketmq.client import Client, StatusError
from outbox.brokers.rocketmq.endpoints import Endpoint
from outbox.brokers.rocketmq.envelope import half_id, seal
from outbox.brokers.rocketmq.proxies import Proxies
from outbox.brokers.rocketmq.statuses import LESS, is_flow_control, status_of
from outbox.brokers.rocketmq.stubs import Code, definition, service
from outbox.message import Resolution, TopicSpec, TopicType

A = TypeVar("A")

logger = logging.getLogger(__name__)

SEND_SECONDS = 10.0  # no message of a batch is begun later: the relay's lease must outlast the batch
PROXY_SECONDS = 60.0  # the proxy forgets a half message after 30 s, and we soon after it

RESOLUTIONS = {
    Resolution.COMMIT: definition.TransactionResolution.COMMIT,
    Resolution.ROLLBACK: definition.TransactionResolution.ROLLBACK,
}
ENDED = {Resolution.COMMIT: Ended.COMMITTED, Resolution.ROLLBACK: Ended.ROLLED_BACK}


@dataclass(frozen=True, slots=True)
class Sent:
    """A half message of ours: which proxy has it, what it calls the transaction, when it was sent."""

    endpoint: Endpoint
    transaction_id: str
    at: float


class Sending:
    """
    Sends messages and ends half messages over one link.

    Args:
        clock: gives seconds; it never goes back. The window is measured by it.
        now: gives seconds since 1970. Messages are stamped by it, and nothing else depends on it.
    """

    def __init__(self, link: Client, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time) -> None:
        self._client = link
        self._clock = clock
        self._now = now
        self._proxies = Proxies(clock)
        self._window = link.options.commit_window.total_seconds()
        self._sent: dict[str, Sent] = {}

    def send(self, messages: Sequence[Outgoing], topics: Sequence[TopicSpec]) -> list[SendResult]:
        """Send messages, those of one key one after the other."""
        pairs = list(zip(messages, topics, strict=True))
        chains: dict[object, list[int]] = {}
        for place, (message, topic) in enumerate(pairs):
            chains.setdefault((topic.name, message.key) if topic.type is TopicType.FIFO else place, []).append(place)
        outcomes: list[SendResult | None] = [None] * len(pairs)
        deadline = self._clock() + SEND_SECONDS

        async def send_one(pair: tuple[Outgoing, TopicSpec]) -> SendResult:
            if self._clock() >= deadline:
                return SendResult(SendStatus.UNAVAILABLE, reason="Not sent: the messages before it took too long. It goes again.")
            return await self._send(*pair)

        async def send_chain(chain: list[int]) -> None:
            for place in chain:
                outcomes[place] = outcome = await send_one(pairs[place])
                if outcome.status is not SendStatus.ACCEPTED:  # what stands behind it must not overtake it
                    for later in chain[chain.index(place) + 1 :]:
                        outcomes[later] = SendResult(
                            SendStatus.UNAVAILABLE, reason="An earlier message of its key was not accepted."
                        )
                    return

        self._client.run(self._pipeline(list(chains.values()), send_chain))
        return [outcome for outcome in outcomes if outcome is not None]

    def send_halves(self, messages: Sequence[Outgoing], topics: Sequence[TopicSpec]) -> list[SendResult]:
        """Store half messages, as many as half the window has time for."""
        self._forget_old()
        deadline = self._clock() + self._window / 2

        async def send_one(pair: tuple[Outgoing, TopicSpec]) -> SendResult:
            if self._clock() >= deadline:
                return SendResult(SendStatus.UNAVAILABLE, reason="Not sent: its commit would have come too late. It goes again.")
            return await self._send(*pair, is_half=True)

        return self._client.run(self._pipeline(list(zip(messages, topics, strict=True)), send_one))

    def end(self, halves: Sequence[HalfRef], resolution: Resolution) -> list[SendResult]:
        """Commit or roll back, each half message once; a commit only inside the window."""

        async def end_one(half: HalfRef) -> SendResult:
            return await self._end(half, resolution)

        return self._client.run(self._pipeline(halves, end_one))

    async def _pipeline(self, items: Sequence[Any], act: Callable[[Any], Awaitable[A]]) -> list[A]:
        """Act on all items, so many at once; give the results in order."""
        results: dict[int, A] = {}
        waiting = iter(enumerate(items))

        async def work() -> None:
            for place, item in waiting:
                results[place] = await act(item)

        await asyncio.gather(*[work() for _ in range(min(self._client.options.in_flight, len(items)))])
        return [results[place] for place in range(len(items))]

    async def _send(self, message: Outgoing, topic: TopicSpec, *, is_half: bool = False) -> SendResult:
        wire_id = (message.half_id or half_id(message.message_id)) if is_half else message.message_id
        try:
            endpoint = await self._endpoint(topic, message)
            if self._proxies.seconds_held(endpoint):
                return SendResult(SendStatus.UNAVAILABLE, reason=LESS)
            request = service.SendMessageRequest(messages=[self._seal(message, topic, wire_id)])
        except Exception as error:  # whatever happened, it is an outcome
            return status_of(error)
        at = self._clock()
        try:
            answer = await self._client.call(endpoint, "SendMessage", request)
            entry = answer.entries[0]
            if entry.status.code != Code.OK:
                raise StatusError(entry.status)
        except Exception as error:
            return self._failed(endpoint, topic, error)
        self._proxies.note_answer(endpoint, self._clock() - at)
        if not is_half:
            return SendResult(SendStatus.ACCEPTED)
        self._sent[wire_id] = Sent(endpoint, entry.transaction_id, at)
        return SendResult(SendStatus.ACCEPTED, half_id=wire_id)

    def _seal(self, message: Outgoing, topic: TopicSpec, wire_id: str) -> Any:
        options = self._client.options
        resource = self._client.resource(topic.name)
        return seal(message, topic.type, wire_id, resource, now=self._now(), compress_above=options.compress_above_bytes)

    def _failed(self, endpoint: Endpoint, topic: TopicSpec, error: Exception) -> SendResult:
        """Note what a failure says of its proxy; give the outcome."""
        outcome = status_of(error)
        if is_flow_control(error):
            if seconds := self._proxies.note_flow_control(endpoint):
                logger.warning("Proxy %s asks for less, and is sent nothing for %.1f s: %s", endpoint.target, seconds, error)
        elif outcome.status is not SendStatus.REFUSED:
            self._client.routes.doubt(topic.name)
            if outcome.status is not SendStatus.MISCONFIGURED:
                self._proxies.note_failure(endpoint)
        return outcome

    async def _endpoint(self, topic: TopicSpec, message: Outgoing) -> Endpoint:
        """Choose the proxy: the best in turn, but always the same one for a key that keeps order."""
        queues = await self._client.routes.of(topic.name)
        writable = [queue.endpoint for queue in queues if queue.is_writable] or [queue.endpoint for queue in queues]
        if topic.type is TopicType.FIFO:
            return writable[zlib.crc32(message.key.encode()) % len(writable)]
        first = self._client.next_turn() % len(writable)
        return self._proxies.choose(writable[first:] + writable[:first])

    async def _end(self, half: HalfRef, resolution: Resolution) -> SendResult:
        sent = self._sent.pop(half.half_id, None)
        if sent is None:
            return SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND, reason="Not sent by this process, or ended before.")
        if resolution is Resolution.COMMIT and self._clock() - sent.at > self._window:
            return SendResult(SendStatus.UNSURE, reason="Too late to be committed beside the checks; the check-back commits it.")
        request = service.EndTransactionRequest(
            topic=self._client.resource(half.topic),
            message_id=half.half_id,
            transaction_id=sent.transaction_id,
            resolution=RESOLUTIONS[resolution],
            source=definition.TransactionSource.SOURCE_CLIENT,
        )
        try:
            await self._client.call(sent.endpoint, "EndTransaction", request)
        except StatusError as error:
            if error.code == Code.INTERNAL_SERVER_ERROR:  # the proxy has it no more: ended, or the check-back has the word
                return SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND, reason=f"RocketMQ says {error}.")
            return SendResult(SendStatus.UNSURE, reason=f"RocketMQ says {error}.")
        except Exception as error:  # the COMMIT may have arrived, and is not repeated
            return status_of(error)
        return SendResult(SendStatus.ACCEPTED, ended=ENDED[resolution])

    def _forget_old(self) -> None:
        oldest = self._clock() - PROXY_SECONDS
        while self._sent and (first := next(iter(self._sent.items())))[1].at < oldest:
            del self._sent[first[0]]
