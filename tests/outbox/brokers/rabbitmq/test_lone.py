"""What a message costs that comes alone: waits and round trips, and not time."""

from collections.abc import Callable
from datetime import timedelta

import amqp
import pytest

from outbox.brokers.base import Outgoing
from tests.outbox.brokers.rabbitmq.conftest import HELD

pytestmark = pytest.mark.rabbitmq

NewMessage = Callable[..., Outgoing]


class TestLoneMessage:
    def test_is_handed_out_without_a_read_that_waits_for_nothing(self, broker, message: NewMessage, topic, monkeypatch):
        waits = []
        read = amqp.Connection.blocking_read

        def blocking_read(connection, timeout=None):
            try:
                return read(connection, timeout)
            except TimeoutError:
                waits.append(timeout)
                raise

        monkeypatch.setattr(amqp.Connection, "blocking_read", blocking_read)
        broker.send([message()])
        [delivery] = broker.receive("billing", [topic], limit=9, invisible_for=HELD, wait=timedelta(seconds=5))
        broker.ack([delivery])

        assert waits == []
