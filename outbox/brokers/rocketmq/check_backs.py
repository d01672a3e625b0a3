"""
Answers the server's check-backs, which a proxy sends to any producer that announced the topic, on the stream of its session.

If `ask` raises an exception, or returns UNKNOWN, nothing is sent, because the server asks again by itself. Each COMMIT makes a
copy of the message. So if the message is already visible, ROLLBACK is sent instead; then its only effect is that the server stops
asking.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.codec import BORN_EARLIER_SECONDS, clock_ahead, to_half
from outbox.brokers.rocketmq.endpoints import Endpoint
from outbox.brokers.rocketmq.errors import StatusError, describe, is_outage
from outbox.brokers.rocketmq.half_lookup import HalfLookup
from outbox.brokers.rocketmq.proxy_half_sender import RESOLUTIONS
from outbox.brokers.rocketmq.remoting.frames import RemotingError
from outbox.brokers.rocketmq.session import ANNOUNCE_SECONDS, Session, settings_of
from outbox.brokers.rocketmq.stubs import definition, service
from outbox.logs import get_logger
from outbox.message import Half, Resolution

logger = get_logger(__name__)

THREADS = 4  # the maximum number of check-backs that are answered at once
DISCOVERY_SECONDS = 2.0  # the interval of route queries while the proxies of a topic are unknown

Ask = Callable[[Half], Resolution]
OnOtherAnswer = Callable[[Half, Resolution], None]


class CheckBackListener:
    """Listens for check-backs on every proxy in the routes of some topics, and answers with the results of `ask`."""

    def __init__(
        self,
        client: RocketMQClient,
        topics: list[str],
        ask: Ask,
        half_lookup: HalfLookup,
        on_other_answer: OnOtherAnswer | None = None,
    ) -> None:
        self._client = client
        self._topics = topics
        self._ask = ask
        self._half_lookup = half_lookup
        self._on_other_answer = on_other_answer
        self._sessions: dict[str, Session] = {}
        self._answers: dict[str, asyncio.Task[None]] = {}  # half id -> the task that answers a check-back about it
        self._troubles: dict[str, str] = {}  # topic -> why its route is unknown
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="outbox-check-back")
        self._discovery = asyncio.run_coroutine_threadsafe(self._find_proxies(), client.loop())

    def close(self) -> None:
        """Stop listening. Answers in progress are dropped, and the server asks again."""
        self._discovery.cancel()
        for session in self._sessions.values():
            self._client.loop().call_soon_threadsafe(session.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _find_proxies(self) -> None:
        """Keep a session with each proxy in the routes of the topics, and close the others."""
        while True:
            access_points = {self._client.access_point.target: self._client.access_point}
            for topic in self._topics:
                access_points |= await self._proxies_of(topic)
            for target, endpoint in access_points.items():
                if target not in self._sessions:
                    self._sessions[target] = self._open(endpoint)
            if not self._troubles:
                for target in self._sessions.keys() - access_points.keys():
                    self._sessions.pop(target).close()
            await asyncio.sleep(DISCOVERY_SECONDS if self._troubles else ANNOUNCE_SECONDS)

    async def _proxies_of(self, topic: str) -> dict[str, Endpoint]:
        try:
            queues = await self._client.routes.of(topic)
        except (grpc.aio.AioRpcError, StatusError) as error:
            trouble = describe(error)
            logger.warning("No check-backs are received for topic %s yet: %s", topic, trouble)
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
        """Answer a check-back, unless an earlier one about its half message is being answered: two COMMITs make two copies."""
        if not command.HasField("recover_orphaned_transaction_command"):
            return
        question = command.recover_orphaned_transaction_command
        half_id = question.message.system_properties.message_id
        if half_id not in self._answers:
            self._answers[half_id] = asyncio.get_running_loop().create_task(self._answer(endpoint, question))
            self._answers[half_id].add_done_callback(lambda _: self._answers.pop(half_id, None))

    async def _answer(self, endpoint: Endpoint, question: Any) -> None:
        try:
            half = to_half(question.message)
            if half.asked == 1:
                self._check_clock(half, clock_ahead(question.message))
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._threads, self._ask, half)
            if answer is Resolution.COMMIT and await self._is_visible(half):
                answer = Resolution.ROLLBACK
                if self._on_other_answer is not None:
                    await loop.run_in_executor(self._threads, self._on_other_answer, half, answer)
            if answer is not Resolution.UNKNOWN:
                request = service.EndTransactionRequest(
                    topic=question.message.topic,
                    message_id=half.half_id,
                    transaction_id=question.transaction_id,
                    resolution=RESOLUTIONS[answer],
                    source=definition.TransactionSource.SOURCE_SERVER_CHECK,
                )
                await self._client.call(endpoint, "EndTransaction", request)
        except Exception as error:
            logger.log(
                logging.WARNING if is_outage(error) else logging.ERROR,
                "A check-back about %s could not be answered; the server will ask again: %s",
                question.transaction_id,
                describe(error),
                exc_info=None if is_outage(error) else error,
            )

    async def _is_visible(self, half: Half) -> bool:
        """Return whether the message is in its topic; False if that is unknown, since a duplicate is better than a loss."""
        try:
            return await self._half_lookup.is_visible(half.topic, half.half_id)
        except (ConnectionError, RemotingError) as error:
            logger.info(
                "Message %s may be duplicated, since it cannot be looked up before its COMMIT: %s", half.message_id, error
            )
            return False

    def _check_clock(self, half: Half, ahead: float) -> None:
        """Log an error if a sender's clock is wrong: the server then asks about half messages before they can be ended."""
        if half.token and abs(ahead) > BORN_EARLIER_SECONDS:
            logger.error(
                "The clock of a relay was %.1f s %s a RocketMQ broker's when it sent message %s, so the broker asks about half "
                "messages too early, which makes duplicates. Synchronize both clocks with NTP.",
                abs(ahead),
                "ahead of" if ahead > 0 else "behind",
                half.message_id,
            )
