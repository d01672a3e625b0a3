"""
Publisher confirms of RabbitMQ, awaited for a batch, and reads without a wait: for its own broker (`rabbitmq/`) and for Celery's
tasks (`celery/confirms.py`).

The server counts the messages of a channel, and answers by their numbers (delivery tags). A message that no queue takes comes
back before its confirm, if it was published as mandatory. The channel of a batch without all answers is not used again, since a
late answer would be taken for that to another batch.

Source: https://www.rabbitmq.com/docs/confirms
"""

from __future__ import annotations

import select
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from outbox.brokers.base import ACCEPTED, SendResult

if TYPE_CHECKING:  # the callers have it
    import amqp

Name = tuple[str, str]  # exchange and message id, by which a message that comes back is known

LOOK_SECONDS = 0.2  # how soon a wait for confirms sees that it is to end
WRITE_BYTES = 16_384  # of frames that are written to the socket together
FRAME_SECONDS = 0.01  # for the rest of a frame that has come in half; with 0, py-amqp would spin


class PendingConfirms(msgspec.Struct):
    """
    The messages of a batch, in the order in which they are published, and what the server has answered.

    Args:
        not_taken: the result of a message that the server has not taken (nack).
        explain_return: returns the result of a message that came back, by the error, the exchange and the routing key.
    """

    not_taken: SendResult
    explain_return: Callable[[Exception, str, str], SendResult]
    results: list[SendResult | None] = msgspec.field(default_factory=list)
    returned: dict[Name, SendResult] = msgspec.field(default_factory=dict)
    pending: int = 0
    first_tag: int = 0  # the delivery tag of the first one
    _names: list[Name] = msgspec.field(default_factory=list)
    _settled_to: int = 0  # all before this index are settled

    @property
    def next_tag(self) -> int:
        """The delivery tag of the message that is published next."""
        return self.first_tag + len(self._names)

    def extend(self, names: Iterable[Name]) -> None:
        """Add messages that are about to be published."""
        added = list(names)
        self._names += added
        self.results += [None] * len(added)
        self.pending += len(added)

    def remove_last(self) -> None:
        """Remove the last message, which was not published."""
        self._names.pop()
        self.results.pop()
        self.pending -= 1

    def on_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        """Note that a message came back."""
        name = (exchange, message.properties.get("message_id", ""))
        self.returned[name] = self.explain_return(error, exchange, routing_key)

    def on_ack(self, tag: int, multiple: bool) -> None:
        """Note that messages are stored."""
        self._settle(tag, multiple, ACCEPTED)

    def on_nack(self, tag: int, multiple: bool) -> None:
        """Note that messages are not stored in all of their queues. They may be in some."""
        self._settle(tag, multiple, self.not_taken)

    def wait(self, connection: amqp.Connection, deadline: float, is_stopped: Callable[[], bool]) -> None:
        """Read what the server sends until all is confirmed, the wait is stopped, or the deadline of `monotonic` is over."""
        while self.pending and not is_stopped() and (left := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                connection.blocking_read(min(left, LOOK_SECONDS))  # one frame: a heartbeat does not prolong the wait

    def finish(self, rest: SendResult) -> list[SendResult]:
        """Return the results, and this one for messages without an answer."""
        return [result or rest for result in self.results]

    def _settle(self, tag: int, multiple: bool, result: SendResult) -> None:
        last = tag - self.first_tag
        if last < 0:  # of an earlier batch, whose results are known
            return
        for index in range(self._settled_to if multiple else last, last + 1):
            if self.results[index] is None:
                self.results[index] = self.returned.get(self._names[index], result)
                self.pending -= 1
        if multiple:
            self._settled_to = last + 1


class ConfirmingChannel:
    """A channel whose messages the server counts and confirms, for one batch after the other."""

    def __init__(self, connection: amqp.Connection) -> None:
        self.channel = connection.channel()
        self.channel.confirm_select()
        self._last: PendingConfirms | None = None
        self._connection = connection
        self._buffer = _WriteBuffer(connection.transport)
        self._write_frame = connection.frame_writer_cls(connection, self._buffer)  # type: ignore[attr-defined]

    def begin(self, batch: PendingConfirms) -> amqp.Channel:
        """Register this batch, and no other, for the answers of the channel; return the channel."""
        batch.first_tag = self._last.next_tag if self._last else 1
        self._last = batch
        events: dict[str, set[Callable[..., None]]] = self.channel.events  # type: ignore[attr-defined]  # the stubs lack it
        events.update(basic_ack={batch.on_ack}, basic_nack={batch.on_nack}, basic_return={batch.on_return})
        return self.channel

    @contextmanager
    def writing_together(self) -> Iterator[None]:
        """
        Write what is sent in the block to the socket in large pieces, the last one at its end.

        Nothing is read in the block: py-amqp's own answers would wait, too. After an exception the channel is not used again.
        """
        connection = self._connection
        before = connection.frame_writer
        connection.frame_writer = self._write_frame  # type: ignore[misc]  # the stubs have it read-only
        try:
            yield
            self._buffer.flush()
        finally:
            connection.frame_writer = before  # type: ignore[misc]


class _WriteBuffer:
    """What py-amqp's writer of frames takes for its transport."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._waiting = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        """Copy frames, and write them when they are enough."""
        self._waiting += data
        if len(self._waiting) >= WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        data, self._waiting = self._waiting, bytearray()
        if data:
            self._transport.write(data)


def handle_input(connection: amqp.Connection) -> None:
    """
    Handle what the server has sent, and wait for nothing: this is done before each message.

    Raises:
        AMQPError, OSError: the server has closed the connection, or a channel.
    """
    while _has_input(connection):
        with suppress(TimeoutError):
            connection.drain_events(timeout=FRAME_SECONDS)


def _has_input(connection: amqp.Connection) -> bool:
    sock = getattr(connection.transport, "sock", None)
    if sock is None:
        return True  # reading says that it is closed
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))
