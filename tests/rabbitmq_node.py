"""A real RabbitMQ, one for all tests of a process, started by the first that needs it."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

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
