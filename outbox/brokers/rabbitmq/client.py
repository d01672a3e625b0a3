"""
A connection to one of the nodes, which threads may share.

py-amqp reads and writes in the thread that calls it, and only one thread may do so at a time, so each use holds the lock. A wait
for messages holds it only while there is data to read. Each connection has a thread that sends heartbeats, and so notices that
its node is unreachable.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import amqp
from amqp.exceptions import AMQPError

from outbox.brokers.confirms import handle_input
from outbox.brokers.rabbitmq.frames import tolerant_frame_handler
from outbox.brokers.rabbitmq.options import RabbitMQOptions, addresses
from outbox.errors import BrokerUnavailable
from outbox.logs import get_logger

logger = get_logger(__name__)

# py-amqp raises these when a connection is lost, a node refuses a request, or an answer does not arrive in time.
LOST = (AMQPError, OSError)


class RabbitMQConnection:
    """
    A connection that is opened when it is first used, and again after it was lost.

    Args:
        name: shown in RabbitMQ's list of connections.
        on_tick: called about once a second while the connection is open, by a thread that holds the lock.
    """

    def __init__(self, options: RabbitMQOptions, name: str, *, on_tick: Callable[[], None] = lambda: None) -> None:
        self.lock = threading.RLock()
        # Changes when a connection is opened or lost. Channels and deliveries of an older serial do not exist any more.
        self.serial = 0
        self.is_blocked = False  # whether the server takes no messages, because it is short of memory or disk
        self._options = options
        self._name = name
        self._on_tick = on_tick
        self._timeout = options.request_timeout.total_seconds()
        self._amqp: amqp.Connection | None = None
        self._is_closed = threading.Event()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        for descriptor in (self._wake_reader, self._wake_writer):  # not in `close`, since `wake` may be called later
            weakref.finalize(self, os.close, descriptor)
        self._heartbeat_thread: threading.Thread | None = None

    @contextmanager
    def use(self) -> Iterator[amqp.Connection]:
        """
        Hold the lock and yield the open connection. After any exception in the block, also a timeout, the connection is dropped.

        A channel error that leaves the block drops the connection, too, since the deliveries of the channel are lost anyway.

        Raises:
            BrokerUnavailable: there is no connection to any node.
        """
        with self.lock:
            connection = self._open()
            try:
                with connection.transport.having_timeout(self._timeout):
                    yield connection
            except BaseException:  # it may leave half a frame, or a message without its confirm
                self.drop()
                raise

    def wait(self, seconds: float, is_done: Callable[[], bool]) -> None:
        """
        Read frames of the server until `is_done`, or until the timeout is over. Other threads may use the connection meanwhile.

        Raises:
            AMQPError, OSError: the connection was lost.
        """
        deadline = time.monotonic() + seconds
        while True:
            poller = select.poll()
            poller.register(self._wake_reader, select.POLLIN)
            with self.use() as connection:
                handle_input(connection)
                if is_done() or self._is_closed.is_set():
                    return
                poller.register(connection.transport.sock, select.POLLIN)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            if any(descriptor == self._wake_reader for descriptor, _ in poller.poll(remaining * 1000)):
                os.read(self._wake_reader, 4096)

    def wake(self) -> None:
        """Make a current `wait` call `is_done` again. Any thread may call this."""
        with suppress(BlockingIOError):  # the pipe is full, so a wait is woken anyway
            os.write(self._wake_writer, b"w")

    def drop(self) -> None:
        """Drop the current connection. The server takes back all unacknowledged messages that were delivered over it."""
        with self.lock:
            connection, self._amqp = self._amqp, None
            self.is_blocked = False
            if connection is not None:
                self.serial += 1
                with suppress(*LOST):
                    connection.collect()

    def close(self) -> None:
        """Close the connection for good. Any thread may call this; a second call does nothing."""
        self._is_closed.set()
        self.wake()
        with self.lock:
            connection, self._amqp = self._amqp, None
            if connection is not None:
                if not self.is_blocked:  # a server that blocks the connection would not answer
                    with suppress(*LOST), connection.transport.having_timeout(self._timeout):
                        connection.close()
                with suppress(*LOST):
                    connection.collect()

    def _open(self) -> amqp.Connection:
        """Return the open connection; without one, connect to the first node that answers. Raises BrokerUnavailable."""
        if self._is_closed.is_set():
            raise BrokerUnavailable("The broker was closed.")
        if self._amqp is not None and self._amqp.connected:
            return self._amqp
        self.drop()
        errors = []
        for address in addresses(self._options):
            try:
                self._amqp = connect(self._options, address, self._name, on_block=self._set_blocked)
            except LOST as error:
                errors.append(f"{address}: {describe(error)}")
            else:
                self.serial += 1
                if self._heartbeat_thread is None:
                    self._heartbeat_thread = threading.Thread(
                        target=self._send_heartbeats, name=f"{self._name} heartbeat", daemon=True
                    )
                    self._heartbeat_thread.start()
                return self._amqp
        raise BrokerUnavailable(f"No node of RabbitMQ could be connected to: {'; '.join(errors)}.")

    def _set_blocked(self, is_blocked: bool) -> None:
        self.is_blocked = is_blocked

    def _send_heartbeats(self) -> None:
        """Send heartbeats, and read those of the server, which would otherwise fill the buffers of an idle connection."""
        pause = min(1.0, self._options.heartbeat.total_seconds() / 4)
        while not self._is_closed.wait(pause):
            with self.lock:
                if self._amqp is None:
                    continue
                try:
                    with self._amqp.transport.having_timeout(self._timeout):
                        self._amqp.heartbeat_tick()
                        handle_input(self._amqp)
                        self._on_tick()
                except LOST as error:
                    logger.info("The connection %r to RabbitMQ was lost: %s", self._name, describe(error))
                    self.drop()
                except Exception:  # the thread has to go on, since without heartbeats the server closes the connection
                    logger.exception("The connection %r to RabbitMQ is dropped after an error.", self._name)
                    self.drop()
            self.wake()


def connect(
    options: RabbitMQOptions, address: str, name: str, *, on_block: Callable[[bool], None] = lambda is_blocked: None
) -> amqp.Connection:
    """
    Connect to one node.

    Args:
        address: host:port.
        name: shown in RabbitMQ's list of connections.
        on_block: called with True when the server blocks the connection, and with False when it takes messages again.

    Raises:
        AMQPError, OSError: the node does not answer, or refuses the connection.
    """
    timeout = options.request_timeout.total_seconds()
    host = address.rpartition(":")[0].strip("[]")
    tls = {"context": {"check_hostname": True, "cafile": options.tls_ca_file or None}, "server_hostname": host}
    connection = amqp.Connection(
        host=address,
        userid=options.user,
        password=options.password,
        login_method="PLAIN",
        virtual_host=options.virtual_host,
        ssl=tls if options.tls else False,
        connect_timeout=timeout,
        write_timeout=timeout,
        heartbeat=math.ceil(options.heartbeat.total_seconds()),
        client_properties={"connection_name": name},
        on_blocked=lambda reason: on_block(True),
        on_unblocked=lambda: on_block(False),
        frame_handler=tolerant_frame_handler,
    )
    connection.Channel = partial(amqp.Channel, auto_decode=False)  # type: ignore[assignment]  # a body stays the bytes that were sent
    connection.connect()
    return connection


def describe(error: BaseException) -> str:
    """Return a line that describes an error."""
    code, text = getattr(error, "reply_code", None), getattr(error, "reply_text", None)
    if code and text:
        return f"{text} ({code})"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
