"""
Answers the server's check-backs: it asks any producer that announced the topic, over the session's stream.

An exception of `ask` means UNKNOWN. UNKNOWN is not sent: the server asks again by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from outbox.brokers.rocketmq.envelope import open_half
from outbox.brokers.rocketmq.link import Endpoint, Link
from outbox.brokers.rocketmq.sending import RESOLUTIONS
from outbox.brokers.rocketmq.session import AGAIN_SECONDS, ANNOUNCE_SECONDS, Session, settings_of
from outbox.brokers.rocketmq.stubs import definition, service
from outbox.message import Half, Resolution

logger = logging.getLogger(__name__)


class Checks:
    """Listens for check-backs about topics, on every proxy that the routes name, and answers by `ask`."""

    def __init__(self, link: Link, topics: list[str], ask: Callable[[Half], Resolution]) -> None:
        self._link = link
        self._topics = topics
        self._ask = ask
        self._sessions: dict[str, Session] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(link.options.checker_threads, thread_name_prefix="outbox-check-back")
        self._finder = asyncio.run_coroutine_threadsafe(self._find_proxies(), link.loop())

    def close(self) -> None:
        """Listen no more; what is being answered is dropped, and asked again."""
        self._finder.cancel()
        for session in self._sessions.values():
            self._link.loop().call_soon_threadsafe(session.close)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _find_proxies(self) -> None:
        while True:
            found = {self._link.home.target: self._link.home}
            for topic in self._topics:
                try:
                    endpoints = [queue.endpoint for queue in await self._link.route(topic)]
                except Exception as error:
                    logger.warning("No check-backs from topic %s's brokers yet: %s", topic, error)
                else:
                    found |= {endpoint.target: endpoint for endpoint in endpoints}
            for target, endpoint in found.items():
                if target not in self._sessions:
                    self._sessions[target] = self._open(endpoint)
            await asyncio.sleep(ANNOUNCE_SECONDS if len(found) > 1 else AGAIN_SECONDS * 4)

    def _open(self, endpoint: Endpoint) -> Session:
        settings = settings_of(self._link, endpoint, definition.ClientType.PRODUCER)
        settings.publishing.topics.extend(self._link.resource(topic) for topic in self._topics)
        heartbeat = service.HeartbeatRequest(client_type=definition.ClientType.PRODUCER)
        return Session(self._link, endpoint, settings, heartbeat, self._on_command)

    def _on_command(self, endpoint: Endpoint, command: Any) -> None:
        if command.HasField("recover_orphaned_transaction_command"):
            answering = asyncio.get_running_loop().create_task(
                self._answer(endpoint, command.recover_orphaned_transaction_command)
            )
            self._answering.add(answering)  # the loop itself keeps no hold of it
            answering.add_done_callback(self._answering.discard)

    async def _answer(self, endpoint: Endpoint, question: Any) -> None:
        try:
            half = open_half(question.message)
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, half)
            if answer is not Resolution.UNKNOWN:
                request = service.EndTransactionRequest(
                    topic=question.message.topic,
                    message_id=half.half_id,
                    transaction_id=question.transaction_id,
                    resolution=RESOLUTIONS[answer],
                    source=definition.TransactionSource.SOURCE_SERVER_CHECK,
                )
                await self._link.call(endpoint, "EndTransaction", request)
        except Exception:
            logger.exception("A check-back about %s got no answer; it comes again.", question.transaction_id)
