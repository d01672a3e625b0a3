"""
Answers the server's check-backs: it asks any producer that announced the topic, over the session's stream.

An exception of `ask` means UNKNOWN. UNKNOWN is not sent: the server asks again by itself. Each COMMIT that is sent makes a
copy of the message; so where the message is visible already, ROLLBACK is sent, which only ends the asking.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.endpoints import Endpoint
from outbox.brokers.rocketmq.envelope import BORN_EARLIER_SECONDS, clock_ahead, open_half
from outbox.brokers.rocketmq.errors import StatusError, describe
from outbox.brokers.rocketmq.remoting.frames import RemotingError
from outbox.brokers.rocketmq.session import ANNOUNCE_SECONDS, Session, settings_of
from outbox.brokers.rocketmq.stubs import definition, service
from outbox.brokers.rocketmq.unanswered import Unanswered
from outbox.brokers.rocketmq.unconfirmed import RESOLUTIONS
from outbox.logs import get_logger
from outbox.message import Half, Resolution

logger = get_logger(__name__)

THREADS = 4  # answer at once, each with a statement of its own
LOOK_SECONDS = 2.0  # till every topic's proxies are known

Ask = Callable[[Half], Resolution]
NoteSent = Callable[[Half, Resolution], None]


class Checks:
    """Listens for check-backs about topics, on every proxy that the routes name, and answers by `ask`."""

    def __init__(
        self, link: Client, topics: list[str], ask: Ask, unanswered: Unanswered, note_sent: NoteSent | None = None
    ) -> None:
        self._client = link
        self._topics = topics
        self._ask = ask
        self._unanswered = unanswered
        self._note_sent = note_sent
        self._has_named_clocks = False
        self._sessions: dict[str, Session] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}
        self._troubles: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="outbox-check-back")
        self._finder = asyncio.run_coroutine_threadsafe(self._find_proxies(), link.loop())

    def close(self) -> None:
        """Listen no more; what is being answered is dropped, and asked again."""
        self._finder.cancel()
        for session in self._sessions.values():
            self._client.loop().call_soon_threadsafe(session.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _find_proxies(self) -> None:
        """Keep a session with each proxy, and none with those that no topic needs any more."""
        while True:
            found = {self._client.home.target: self._client.home}
            for topic in self._topics:
                found |= await self._proxies_of(topic)
            for target, endpoint in found.items():
                if target not in self._sessions:
                    self._sessions[target] = self._open(endpoint)
            if not self._troubles:
                for target in self._sessions.keys() - found.keys():
                    self._sessions.pop(target).close()
            await asyncio.sleep(LOOK_SECONDS if self._troubles else ANNOUNCE_SECONDS)

    async def _proxies_of(self, topic: str) -> dict[str, Endpoint]:
        try:
            queues = await self._client.routes.of(topic)
        except (grpc.aio.AioRpcError, StatusError) as error:
            trouble = describe(error)
            if self._troubles.get(topic) != trouble:
                logger.warning("No check-backs from topic %s's brokers yet: %s", topic, trouble)
            self._troubles[topic] = trouble
            return {}
        self._troubles.pop(topic, None)
        return {queue.endpoint.target: queue.endpoint for queue in queues}

    def _open(self, endpoint: Endpoint) -> Session:
        settings = settings_of(self._client, endpoint, definition.ClientType.PRODUCER)
        settings.publishing.topics.extend(self._client.resource(topic) for topic in self._topics)
        heartbeat = service.HeartbeatRequest(client_type=definition.ClientType.PRODUCER)
        return Session(self._client, endpoint, settings, heartbeat, self._on_command)

    def _on_command(self, endpoint: Endpoint, command: Any) -> None:
        """Answer a question; not while the same half's last one is being answered: two COMMITs would make two copies."""
        if not command.HasField("recover_orphaned_transaction_command"):
            return
        question = command.recover_orphaned_transaction_command
        half_id = question.message.system_properties.message_id
        if half_id not in self._answering:
            self._answering[half_id] = asyncio.get_running_loop().create_task(self._answer(endpoint, question))
            self._answering[half_id].add_done_callback(lambda _: self._answering.pop(half_id, None))

    async def _answer(self, endpoint: Endpoint, question: Any) -> None:
        try:
            half = open_half(question.message)
            if half.asked == 1:
                self._look_at_clocks(half, clock_ahead(question.message))
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._threads, self._ask, half)
            if answer is Resolution.COMMIT and await self._is_visible(half):
                answer = Resolution.ROLLBACK
                if self._note_sent is not None:
                    await loop.run_in_executor(self._threads, self._note_sent, half, answer)
            if answer is not Resolution.UNKNOWN:
                request = service.EndTransactionRequest(
                    topic=question.message.topic,
                    message_id=half.half_id,
                    transaction_id=question.transaction_id,
                    resolution=RESOLUTIONS[answer],
                    source=definition.TransactionSource.SOURCE_SERVER_CHECK,
                )
                await self._client.call(endpoint, "EndTransaction", request)
        except Exception:
            logger.exception("A check-back about %s got no answer; it comes again.", question.transaction_id)

    async def _is_visible(self, half: Half) -> bool:
        """Return whether the message reached its topic; False where that cannot be told: a copy is better than a loss."""
        try:
            return await self._unanswered.is_visible(half.topic, half.half_id)
        except (ConnectionError, RemotingError) as error:
            logger.info("Message %s cannot be looked up before its COMMIT: %s", half.message_id, error)
            return False

    def _look_at_clocks(self, half: Half, ahead: float) -> None:
        """Log once that a sender's clock is wrong: its half messages are asked about at once, beside their commits."""
        if half.token and abs(ahead) > BORN_EARLIER_SECONDS and not self._has_named_clocks:
            self._has_named_clocks = True
            logger.error(
                "The clock of a relay was %.1f s %s a RocketMQ broker's when it sent message %s: half messages are asked about "
                "too early, which makes copies. Have both follow NTP.",
                abs(ahead),
                "ahead of" if ahead > 0 else "behind",
                half.message_id,
            )
