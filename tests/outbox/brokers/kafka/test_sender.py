"""Reports of deliveries, by a stand-in for the client: a real one brings the report of a message so early only sometimes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outbox.brokers.kafka.client import ConnectionErrors
from outbox.brokers.kafka.sender import ACCEPTED, NO_REPORT, produce
from tests.outbox.brokers.kafka.cluster import message


class Client:
    """Brings reports while the next call polls it, or never."""

    def __init__(self, *, reports: bool = True) -> None:
        self._reports = reports
        self._waiting: list[Callable[[Any, Any], None]] = []

    def produce(self, *_: object, on_delivery: Callable[[Any, Any], None], **__: object) -> None:
        self._waiting.append(on_delivery)

    def poll(self, _: float) -> int:
        while self._reports and self._waiting:
            self._waiting.pop()(None, None)
        return 0

    def flush(self, _: float) -> int:
        return self.poll(0)


class TestReports:
    def test_count_when_they_come_before_the_call_that_produces_returns(self):
        results = produce(Client(), [message("orders"), message("orders")], errors=ConnectionErrors())

        assert results == [ACCEPTED, ACCEPTED]

    def test_that_never_come_leave_the_message_unsure(self):
        assert produce(Client(reports=False), [message("orders")], errors=ConnectionErrors()) == [NO_REPORT]
