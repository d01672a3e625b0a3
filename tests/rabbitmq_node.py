"""A real RabbitMQ, one for all tests of a process, started by the first that needs it."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from amqp.transport import TCPTransport

from project.servers.rabbitmq import RabbitMQ


@cache
def server() -> RabbitMQ:
    if not RabbitMQ.is_here():
        pytest.skip("There is no rabbitmq-server: apt-get install rabbitmq-server.")
    home = Path(tempfile.mkdtemp(prefix="outbox-rabbitmq-"))
    found = RabbitMQ(home)
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    atexit.register(found.stop)
    found.start()
    return found


@contextmanager
def socket_writes() -> Iterator[list[int]]:
    """Note how many bytes each write to a socket has, of connections that are opened in the block."""
    writes: list[int] = []
    write = TCPTransport.write

    def noted(transport: TCPTransport, data: bytes) -> None:
        writes.append(len(data))
        write(transport, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TCPTransport, "write", noted)
        yield writes
