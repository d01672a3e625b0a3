"""
One connection to a broker's or name server's own port: many requests wait for their answers at once.

A request that is not answered in time ends the connection, for one that does not answer may be dead, and nobody says so for
minutes. What waited on it may have been done.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from itertools import count

from outbox.brokers.rocketmq.remoting.frames import Answer, Request, decode, encode, frame_size


class NotConnected(ConnectionError):
    """Raised when a request did not leave: there is no connection. What was asked was not done."""


class NoAnswer(ConnectionError):
    """Raised when a request left and was not answered: what was asked may have been done, or may be later."""


class Connection(asyncio.Protocol):
    """
    A connection. In the thread of its loop only.

    Args:
        seconds: in which a request must be answered.
        keys: access key and secret key, to sign each request with; empty ones: not at all.
    """

    def __init__(self, seconds: float, keys: tuple[str, str] = ("", "")) -> None:
        self._seconds = seconds
        self._keys = keys
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._deadlines: deque[tuple[float, int]] = deque()  # in order: all requests have the same time
        self._timer: asyncio.TimerHandle | None = None
        self._leaving: list[bytes] = []  # frames that are written together, as soon as the loop has nothing else to do
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(
        cls, host: str, port: int, *, seconds: float, keys: tuple[str, str] = ("", ""), tls: ssl.SSLContext | None = None
    ) -> Connection:
        """Connect, within as many seconds. Raises NotConnected."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(lambda: cls(seconds, keys), host, port, ssl=tls)
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            raise NotConnected(f"{host}:{port} cannot be reached: {str(error) or 'no answer in time'}.") from error
        return connection

    @property
    def is_open(self) -> bool:
        """Whether requests can leave."""
        return self._transport is not None and not self._transport.is_closing()

    def ask(self, request: Request) -> asyncio.Future[Answer]:
        """
        Send a request; the answer comes later.

        Raises:
            NotConnected: at once, where it did not leave. The future raises NoAnswer.
        """
        if self._transport is None or self._transport.is_closing():
            raise NotConnected("The connection is closed.")
        number = next(self._numbers)
        frame = encode(request, number, self._keys)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[number] = future
        self._deadlines.append((self._loop.time() + self._seconds, number))
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadlines[0][0], self._look_at_time)
        if not self._leaving:
            self._loop.call_soon(self._flush)
        self._leaving.append(frame)
        return future

    def close(self) -> None:
        """Close it; what waits gets no answer."""
        if self._transport is not None:
            self._transport.abort()
        self._end("The connection was closed.")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hand out the answers that are whole."""
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
        """Fail the requests that wait for an answer."""
        self._end(f"The connection was lost: {error or 'closed by the other end'}.")

    def _flush(self) -> None:
        frames, self._leaving = self._leaving, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(frames))

    def _look_at_time(self) -> None:
        self._timer = None
        while self._deadlines and self._deadlines[0][1] not in self._waiting:
            self._deadlines.popleft()
        if not self._deadlines:
            return
        if self._deadlines[0][0] <= self._loop.time():
            if self._transport is not None:
                self._transport.abort()
            self._end(f"There was no answer in {self._seconds:g} s.")
        else:
            self._timer = self._loop.call_at(self._deadlines[0][0], self._look_at_time)

    def _end(self, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, {}
        self._deadlines.clear()
        for future in waiting.values():
            if not future.done():
                future.set_exception(NoAnswer(reason))
                future.exception()  # whoever waits has it; where nobody does any more, asyncio shall not complain
