"""
The session with each proxy: who we are, announced again and again, and what the proxy asks us on the same stream.

The server asks whoever announced a topic, or forgets us when nothing is heard. A proxy that restarts has forgotten: so
a session announces itself every 10 s, and at once on a new stream when the old one ends or stays silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.endpoints import Endpoint
from outbox.brokers.rocketmq.errors import StatusError, describe
from outbox.brokers.rocketmq.stubs import Code, definition, service
from outbox.logs import get_logger

logger = get_logger(__name__)

ANNOUNCE_SECONDS = 10.0
SILENCE_SECONDS = 25.0  # each announcement is answered; after two without an answer the stream is dead
ANSWER_SECONDS = 3.0
AGAIN_SECONDS = 0.5

OnCommand = Callable[[Endpoint, Any], None]


class Session:
    """
    Keeps one proxy told of one producer or consumer group. In the link's loop only.

    Args:
        settings: what is announced.
        heartbeat: what is said in between.
        on_command: takes what the proxy asks, and must not block.
        role: as which client of the link.
    """

    def __init__(
        self, link: Client, endpoint: Endpoint, settings: Any, heartbeat: Any, on_command: OnCommand, role: str = ""
    ) -> None:
        self._client = link
        self._endpoint = endpoint
        self._settings = settings
        self._heartbeat = heartbeat
        self._on_command = on_command
        self._role = role
        self._is_known = asyncio.Event()
        self._trouble = ""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def wait(self, seconds: float) -> bool:
        """Wait until the proxy has answered; say whether it did."""
        try:
            async with asyncio.timeout(seconds):
                await self._is_known.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End the stream."""
        self._task.cancel()

    async def _keep(self) -> None:
        while True:
            try:
                await self._once()
            except (grpc.aio.AioRpcError, StatusError, TimeoutError) as error:
                self._explain(error)
            except Exception:
                logger.exception("The session with proxy %s failed, and is opened again.", self._endpoint.target)
            self._is_known.clear()
            await asyncio.sleep(AGAIN_SECONDS)

    def _explain(self, error: Exception) -> None:
        """Log why there is no session: once, not at each try, and at the first loss quietly: proxies restart."""
        trouble = describe(error)
        if self._is_known.is_set():
            logger.info("The session with proxy %s ended and is opened again: %s", self._endpoint.target, trouble)
        elif trouble != self._trouble:
            logger.warning("No session with proxy %s, which is tried again and again: %s", self._endpoint.target, trouble)
            self._trouble = trouble

    async def _once(self) -> None:
        """Announce and listen until one of the two ends."""
        stream = self._client.stub(self._endpoint).Telemetry(metadata=self._client.metadata(self._role))
        loop = asyncio.get_running_loop()
        both = {loop.create_task(self._listen(stream)), loop.create_task(self._announce(stream))}
        try:
            ended, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            stream.cancel()
        for task in ended:
            task.result()

    async def _listen(self, stream: Any) -> None:
        while True:
            async with asyncio.timeout(SILENCE_SECONDS):  # Python 3.11's wait_for forgets a cancel when a command comes with it
                command = await stream.read()
            if command is grpc.aio.EOF:
                return
            if command.HasField("settings"):
                self._is_known.set()
                self._trouble = ""
            elif command.status.code not in (Code.CODE_UNSPECIFIED, Code.OK):
                raise StatusError(command.status)
            else:
                self._on_command(self._endpoint, command)

    async def _announce(self, stream: Any) -> None:
        while True:
            await stream.write(service.TelemetryCommand(settings=self._settings))
            # A heartbeat of somebody unknown is refused.
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._is_known.wait()
            await self._client.call(self._endpoint, "Heartbeat", self._heartbeat, role=self._role)
            await asyncio.sleep(ANNOUNCE_SECONDS)


def settings_of(link: Client, endpoint: Endpoint, client_type: int) -> Any:
    """Return the part of the settings that all clients announce."""
    settings = definition.Settings(client_type=client_type, access_point=endpoint.proto)
    settings.request_timeout.FromNanoseconds(round(link.timeout * 1e9))
    settings.user_agent.language = definition.Language.PYTHON
    settings.user_agent.version = "outbox"
    return settings
