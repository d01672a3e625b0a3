"""
The session with a proxy: a stream on which the client announces its settings, and the proxy sends commands.

The server sends check-backs to clients that announced the topic, and forgets a client that is silent. A restarted proxy has
forgotten all clients. So a session repeats its announcement every 10 s, and opens a new stream if the old one ends or is silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.endpoints import Endpoint
from outbox.brokers.rocketmq.errors import StatusError, describe
from outbox.brokers.rocketmq.stubs import Code, definition, service
from outbox.logs import get_logger

logger = get_logger(__name__)

ANNOUNCE_SECONDS = 10.0
SILENCE_SECONDS = 25.0  # a stream without an answer for this time counts as dead; two announcements were sent meanwhile
ANSWER_SECONDS = 3.0  # the timeout for the first answer on a stream
RETRY_SECONDS = 0.5  # the time until another stream is opened

OnCommand = Callable[[Endpoint, Any], None]


class Session:
    """
    Keeps one producer or consumer group announced to one proxy. Use it only in the client's event loop.

    Args:
        settings: the settings to announce.
        heartbeat: the request to send after each announcement.
        on_command: called with the endpoint and each command of the proxy; it must not block.
        role: as in `RocketMQClient.call`.
    """

    def __init__(
        self, client: RocketMQClient, endpoint: Endpoint, settings: Any, heartbeat: Any, on_command: OnCommand, role: str = ""
    ) -> None:
        self._client = client
        self._endpoint = endpoint
        self._settings = settings
        self._heartbeat = heartbeat
        self._on_command = on_command
        self._role = role
        self._is_registered = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def wait(self, seconds: float) -> bool:
        """Wait until the proxy has answered. Return whether it did."""
        try:
            async with asyncio.timeout(seconds):
                await self._is_registered.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End the stream."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            try:
                await self._run_once()
            except (grpc.aio.AioRpcError, StatusError, TimeoutError) as error:
                self._log_trouble(error)
            except Exception:
                logger.exception("The session with proxy %s failed and will be reopened.", self._endpoint.target)
            self._is_registered.clear()
            await asyncio.sleep(RETRY_SECONDS)

    def _log_trouble(self, error: Exception) -> None:
        """Log why there is no session. The loss of a session is only logged with level INFO, since proxies restart sometimes."""
        trouble = describe(error)
        if self._is_registered.is_set():
            logger.info("The session with proxy %s ended and will be reopened: %s", self._endpoint.target, trouble)
        else:
            logger.warning("No session with proxy %s; retrying: %s", self._endpoint.target, trouble)

    async def _run_once(self) -> None:
        """Open a stream, and announce and listen on it until one of the two ends."""
        stream = self._client.stub(self._endpoint).Telemetry(metadata=self._client.metadata(self._role))
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(self._listen(stream)), loop.create_task(self._announce(stream))}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            stream.cancel()
        for task in done:
            task.result()

    async def _listen(self, stream: Any) -> None:
        while True:
            async with asyncio.timeout(SILENCE_SECONDS):  # Python 3.11's wait_for can lose a cancellation
                command = await stream.read()
            if command is grpc.aio.EOF:
                return
            if command.HasField("settings"):
                self._is_registered.set()
            elif command.status.code not in (Code.CODE_UNSPECIFIED, Code.OK):
                raise StatusError(command.status)
            else:
                self._on_command(self._endpoint, command)

    async def _announce(self, stream: Any) -> None:
        while True:
            await stream.write(service.TelemetryCommand(settings=self._settings))
            # Wait for the answer before the heartbeat, since the proxy rejects the heartbeat of an unknown client.
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._is_registered.wait()
            await self._client.call(self._endpoint, "Heartbeat", self._heartbeat, role=self._role)
            await asyncio.sleep(ANNOUNCE_SECONDS)


def settings_of(client: RocketMQClient, endpoint: Endpoint, client_type: int) -> Any:
    """Return the settings that producers and consumers have in common."""
    settings = definition.Settings(client_type=client_type, access_point=endpoint.proto)
    settings.request_timeout.FromNanoseconds(round(client.timeout * 1e9))
    settings.user_agent.language = definition.Language.PYTHON
    settings.user_agent.version = "outbox"
    return settings
