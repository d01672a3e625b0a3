"""Consumers of the test's own, of a memory broker that the code under test finds by its name in the settings."""

from collections.abc import Iterator
from typing import Any

import pytest

from outbox import conf, signals
from outbox.brokers.base import Broker
from outbox.consuming import register
from outbox.consuming.worker import Worker
from tests.outbox.conftest import heard_of


@pytest.fixture(autouse=True)
def _own_brokers_and_consumers(memory_brokers: None, no_consumers: None) -> None:
    """Every test here has brokers and consumers of its own."""


@pytest.fixture
def broker() -> Broker:
    return conf.make_broker("default")


@pytest.fixture
def fifo(settings: Any) -> None:
    """The topic "orders" keeps order."""
    settings.OUTBOX = {**settings.OUTBOX, "TOPICS": {**settings.OUTBOX["TOPICS"], "orders": {"TYPE": "fifo"}}}


@pytest.fixture
def dead_lettered() -> Iterator[list[dict[str, Any]]]:
    """What was said of messages that became dead letters."""
    with heard_of(signals.dead_lettered) as heard:
        yield heard


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
