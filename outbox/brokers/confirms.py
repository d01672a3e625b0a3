"""
Waits for RabbitMQ's publisher confirms of a batch, and reads input without waiting.

The RabbitMQ broker (`rabbitmq/`) and Celery's tasks (`celery/confirms.py`) use this. The server numbers the messages of a
channel, and confirms them by these numbers (delivery tags). If no queue takes a message that was published as mandatory, the
server returns it before the confirm. If a batch did not get all confirms, its channel is not used again, since a late confirm
would be taken for one of another batch.

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

if TYPE_CHECKING:  # amqp is an optional dependency, which all callers have
    import amqp

Name = tuple[str, str]  # exchange and message id, which identify a returned message

POLL_SECONDS = 0.2  # the interval at which a wait for confirms checks whether it is stopped
WRITE_BYTES = 16_384  # frames are written to the socket when they have this size together
FRAME_SECONDS = 0.01  # the timeout for the rest of a partly received frame; with 0, py-amqp would spin


class PendingConfirms(msgspec.Struct):
    """
    The messages of a batch, in the order in which they are published, and the server's answers.

    Args:
        not_taken: the result of a message that the server rejected (nack).
        explain_return: returns the result of a returned message, from the error, the exchange and the routing key.
    """

    not_taken: SendResult
    explain_return: Callable[[Exception, str, str], SendResult]
    results: list[SendResult | None] = msgspec.field(default_factory=list)
    returned: dict[Name, SendResult] = msgspec.field(default_factory=dict)
    pending: int = 0
    first_tag: int = 0  # the delivery tag of the first message
    _names: list[Name] = msgspec.field(default_factory=list)
    _settled_to: int = 0  # each message before this index has a result

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
        """Record that the server returned a message."""
        name = (exchange, message.properties.get("message_id", ""))
        self.returned[name] = self.explain_return(error, exchange, routing_key)

    def on_ack(self, tag: int, multiple: bool) -> None:
        """Record that messages are stored."""
        self._settle(tag, multiple, ACCEPTED)

    def on_nack(self, tag: int, multiple: bool) -> None:
        """Record that messages are not stored in all of their queues; they may be in some."""
        self._settle(tag, multiple, self.not_taken)

    def wait(self, connection: amqp.Connection, deadline: float, is_stopped: Callable[[], bool]) -> None:
        """Read from the server until all messages are confirmed, `is_stopped()`, or the deadline (of `monotonic`) is over."""
        while self.pending and not is_stopped() and (remaining := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                connection.blocking_read(min(remaining, POLL_SECONDS))  # one frame: a heartbeat does not prolong the wait

    def finish(self, rest: SendResult) -> list[SendResult]:
        """Return the results of all messages: `rest` for those without an answer."""
        return [result or rest for result in self.results]

    def _settle(self, tag: int, multiple: bool, result: SendResult) -> None:
        last = tag - self.first_tag
        if last < 0:  # an answer to an earlier batch, whose results are known
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
        Write the frames that are sent in the block to the socket in large pieces, the last one at the end of the block.

        Nothing may be read in the block, since py-amqp's answers to the server would be held back, too. After an exception the
        channel must not be used again.
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
    """Collects the frames of py-amqp's frame writer, in place of its transport."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._buffered = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        """Buffer frames, and write them when they have WRITE_BYTES."""
        self._buffered += data
        if len(self._buffered) >= WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered frames."""
        data, self._buffered = self._buffered, bytearray()
        if data:
            self._transport.write(data)


def handle_input(connection: amqp.Connection) -> None:
    """
    Handle the frames that the server has sent, without waiting, since this is called before each message.

    Raises:
        AMQPError, OSError: the server has closed the connection, or a channel.
    """
    while _has_input(connection):
        with suppress(TimeoutError):
            connection.drain_events(timeout=FRAME_SECONDS)


def _has_input(connection: amqp.Connection) -> bool:
    sock = getattr(connection.transport, "sock", None)
    if sock is None:
        return True  # the connection is closed, and the caller's read raises the error
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))
