"""Reports of deliveries, by a stand-in for the client: the queue of a real one is full only sometimes."""

from collections.abc import Callable
from typing import Any

from outbox.brokers.kafka.client import ConnectionErrors
from outbox.brokers.kafka.sender import ACCEPTED, NO_REPORT, produce
from tests.outbox.brokers.kafka.cluster import message


class Client:
    """Takes one message at a time, and brings its report when it is polled, or never."""

    def __init__(self, *, reports: bool = True) -> None:
        self._reports = reports
        self._waiting: list[Callable[[Any, Any], None]] = []

    def produce(self, *_: object, on_delivery: Callable[[Any, Any], None], **__: object) -> None:
        if self._waiting:
            raise BufferError
        self._waiting.append(on_delivery)

    def poll(self, _: float) -> int:
        while self._reports and self._waiting:
            self._waiting.pop()(None, None)
        return 0

    def flush(self, _: float) -> int:
        return self.poll(0)


class TestReports:
    def test_count_when_they_come_while_the_queue_is_full(self):
        results = produce(Client(), [message("orders"), message("orders")], errors=ConnectionErrors())

        assert results == [ACCEPTED, ACCEPTED]

    def test_that_never_come_leave_the_message_unsure(self):
        assert produce(Client(reports=False), [message("orders")], errors=ConnectionErrors()) == [NO_REPORT]
