"""A memory broker that the code under test finds by its name in the settings, and consumers of the test's own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from outbox import conf
from outbox.brokers.memory import MemoryBroker
from outbox.consuming import register
from outbox.consuming.worker import Worker


class Clock:
    """The broker's time; it moves when the test says so."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now

    def forward(self, time: timedelta) -> None:
        self.now += time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def _outbox(settings, clock) -> None:
    memory = "outbox.brokers.memory.MemoryBroker"
    settings.OUTBOX = {
        "BROKERS": {
            "default": {"BACKEND": memory, "OPTIONS": {"NAME": uuid.uuid4().hex, "CLOCK": clock}},
            "second": {"BACKEND": memory, "OPTIONS": {"NAME": uuid.uuid4().hex, "CLOCK": clock}},
        },
        "TOPICS": {
            "orders": {"TYPE": "normal"},
            "plain": {"TYPE": "normal"},
            "ordered": {"TYPE": "fifo"},
            "elsewhere": {"BROKER": "second", "TYPE": "normal"},
        },
    }


@pytest.fixture(autouse=True)
def _no_consumers(monkeypatch) -> None:
    monkeypatch.setattr(register, "_groups", {})


@pytest.fixture
def broker() -> MemoryBroker:
    return conf.make_broker("default")


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker of the group "cart", made when it is first used: after the test's consumers."""
    made: list[Worker] = []

    def step() -> Worker:
        made.append(Worker(register.group("cart"), "default"))
        return made[-1]

    yield step
    for one in made:
        one.close()
