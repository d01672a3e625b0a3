"""
A connection to a broker or name server, with concurrent requests.

A request that is not answered in time closes the connection, because a dead connection may go unnoticed for minutes. The server
may have carried out the other requests of that connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from itertools import count
from typing import cast

from outbox.brokers.rocketmq.remoting.frames import RemotingAnswer, Request, decode, encode, frame_size


class NotConnected(ConnectionError):
    """Raised if a request was not sent, because there is no connection."""


class NoAnswer(ConnectionError):
    """Raised if a request was sent and not answered. The server may have carried it out, or may do so later."""


class RemotingConnection(asyncio.Protocol):
    """
    A connection. Use it only in the thread of its event loop.

    Args:
        seconds: the timeout of a request.
        keys: access key and secret key to sign each request with; empty: do not sign.
    """

    def __init__(self, seconds: float, keys: tuple[str, str] = ("", "")) -> None:
        self._seconds = seconds
        self._keys = keys
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[RemotingAnswer]] = {}  # number of a request -> the future of its answer
        self._deadlines: deque[tuple[float, int]] = deque()  # (deadline, number of the request), in order
        self._timer: asyncio.TimerHandle | None = None
        self._outgoing: list[bytes] = []  # frames to be written together in the loop's next iteration
        self._data = bytearray()  # received, and not decoded yet
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(
        cls, host: str, port: int, *, seconds: float, keys: tuple[str, str] = ("", ""), tls: ssl.SSLContext | None = None
    ) -> RemotingConnection:
        """Connect within the given seconds. Raises NotConnected."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(lambda: cls(seconds, keys), host, port, ssl=tls)
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            raise NotConnected(f"{host}:{port} cannot be reached: {str(error) or 'no answer in time'}.") from error
        return connection

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, request: Request) -> asyncio.Future[RemotingAnswer]:
        """
        Send a request. Return a future of its answer, which may raise NoAnswer.

        Raises:
            NotConnected: the request cannot be sent.
        """
        if self._transport is None or self._transport.is_closing():
            raise NotConnected("The connection is closed.")
        number = next(self._numbers)
        frame = encode(request, number, self._keys)
        future: asyncio.Future[RemotingAnswer] = self._loop.create_future()
        self._waiting[number] = future
        self._deadlines.append((self._loop.time() + self._seconds, number))
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadlines[0][0], self._check_deadlines)
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(frame)
        return future

    def close(self) -> None:
        """Close the connection. Pending requests fail with NoAnswer."""
        if self._transport is not None:
            self._transport.abort()
        self._fail_pending("The connection was closed.")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to use the transport (asyncio calls this)."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Deliver the answers that are complete (asyncio calls this)."""
        self._data += data
        at = 0
        while (size := frame_size(self._data, at)) is not None and len(self._data) - at >= size:
            number, answer = decode(bytes(self._data[at : at + size]))
            at += size
            if answer is None:
                continue
            future = self._waiting.pop(number, None)
            if future is not None and not future.done():
                future.set_result(answer)
        del self._data[:at]

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the pending requests (asyncio calls this)."""
        self._fail_pending(f"The connection was lost: {error or 'closed by the server'}.")

    def _flush(self) -> None:
        frames, self._outgoing = self._outgoing, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(frames))

    def _check_deadlines(self) -> None:
        self._timer = None
        while self._deadlines and self._deadlines[0][1] not in self._waiting:
            self._deadlines.popleft()
        if not self._deadlines:
            return
        if self._deadlines[0][0] <= self._loop.time():
            if self._transport is not None:
                self._transport.abort()
            self._fail_pending(f"There was no answer in {self._seconds:g} s.")
        else:
            self._timer = self._loop.call_at(self._deadlines[0][0], self._check_deadlines)

    def _fail_pending(self, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, {}
        self._deadlines.clear()
        for future in waiting.values():
            if not future.done():
                future.set_exception(NoAnswer(reason))
                future.exception()  # mark it as retrieved: asyncio warns otherwise if the caller was cancelled
