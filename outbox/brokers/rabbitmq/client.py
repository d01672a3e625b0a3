"""
A connection to one of the nodes, which threads may share.

py-amqp reads and writes in the thread that calls it, and only one thread may do so at a time: each use holds the lock. A wait
for messages holds it only while there is something to read. A thread of the connection's own sends heartbeats, and notices
that a node is gone.
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

import amqp
from amqp.exceptions import AMQPError

from outbox.brokers.confirms import handle_input
from outbox.brokers.rabbitmq.frames import tolerant_frame_handler
from outbox.brokers.rabbitmq.options import RabbitMQOptions, addresses
from outbox.errors import BrokerUnavailable
from outbox.logs import get_logger

logger = get_logger(__name__)

LOST = (AMQPError, OSError)  # what py-amqp raises when a connection breaks, a node refuses, or an answer does not come in time


class RabbitMQConnection:
    """
    Connects when it is first used, and again after it was lost.

    Args:
        name: shown in RabbitMQ's list of connections.
        on_tick: called about once a second while the connection is open, by a thread that holds the lock.
    """

    def __init__(self, options: RabbitMQOptions, name: str, *, on_tick: Callable[[], None] = lambda: None) -> None:
        self.lock = threading.RLock()
        self.serial = 0  # changes with each connection, and when it is lost; what belongs to an older one is gone
        self.is_blocked = False  # the server takes no messages, since memory or disk are short
        self._options = options
        self._name = name
        self._on_tick = on_tick
        self._timeout = options.request_timeout.total_seconds()
        self._amqp: amqp.Connection | None = None
        self._is_closed = threading.Event()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        for end in (self._wake_reader, self._wake_writer):  # with the object, since `wake` may come after `close`
            weakref.finalize(self, os.close, end)
        self._heart: threading.Thread | None = None

    @contextmanager
    def use(self) -> Iterator[amqp.Connection]:
        """
        Hold the lock and yield the open connection. It is dropped after an error, a request without an answer in time included.

        A channel error that the caller does not catch drops it, too: the channel's deliveries are lost in either case.

        Raises:
            BrokerUnavailable: no node could be connected to.
        """
        with self.lock:
            connection = self._open()
            try:
                with connection.transport.having_timeout(self._timeout):
                    yield connection
            except BaseException:  # an exception in the middle of a frame, or between a message and its confirm, too
                self.drop()
                raise

    def wait(self, seconds: float, is_done: Callable[[], bool]) -> None:
        """
        Read what the server sends until `is_done`, or until the timeout is over. Others may use the connection meanwhile.

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
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if any(ready == self._wake_reader for ready, _ in poller.poll(left * 1000)):
                os.read(self._wake_reader, 4096)

    def wake(self) -> None:
        """Make a wait call `is_done` again. From any thread."""
        with suppress(BlockingIOError):  # it is full: a wait is woken anyway
            os.write(self._wake_writer, b"w")

    def drop(self) -> None:
        """Forget the current connection; the server takes back what was delivered over it."""
        with self.lock:
            connection, self._amqp = self._amqp, None
            self.is_blocked = False
            if connection is not None:
                self.serial += 1
                with suppress(*LOST):
                    connection.collect()

    def close(self) -> None:
        """Close the connection for good. From any thread; a second call does nothing."""
        self._is_closed.set()
        self.wake()
        with self.lock:
            connection, self._amqp = self._amqp, None
            if connection is not None:
                if not self.is_blocked:  # else the server answers nothing
                    with suppress(*LOST), connection.transport.having_timeout(self._timeout):
                        connection.close()
                with suppress(*LOST):
                    connection.collect()

    def _open(self) -> amqp.Connection:
        if self._is_closed.is_set():
            raise BrokerUnavailable("The broker was closed.")
        if self._amqp is not None and self._amqp.connected:
            return self._amqp
        self.drop()
        errors = []
        for address in addresses(self._options):
            try:
                self._amqp = connect(self._options, address, self._name, on_block=self._note_block)
            except LOST as error:
                errors.append(f"{address}: {describe(error)}")
            else:
                self.serial += 1
                if self._heart is None:
                    self._heart = threading.Thread(target=self._beat, name=f"{self._name} heartbeat", daemon=True)
                    self._heart.start()
                return self._amqp
        raise BrokerUnavailable(f"No node of RabbitMQ could be connected to: {'; '.join(errors)}.")

    def _note_block(self, is_blocked: bool) -> None:
        self.is_blocked = is_blocked

    def _beat(self) -> None:
        """Send heartbeats, and read those of the server, which else would fill the buffers of an idle connection."""
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
                except Exception:  # the thread has to go on: without heartbeats the server ends the connection
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
        name: as for `RabbitMQConnection`.
        on_block: called with True when the server takes no messages, with False when it takes them again.

    Raises:
        AMQPError, OSError: the node does not answer, or refuses.
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
    connection.connect()
    return connection


def describe(error: BaseException) -> str:
    """Return what happened, in a line."""
    code, text = getattr(error, "reply_code", None), getattr(error, "reply_text", None)
    if code and text:
        return f"{text} ({code})"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
