"""The harness of the contract, on a server that asks about half messages after a second."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outbox.brokers.base import Broker
from tests.contracts.acts import Acts

HERE = Path(__file__).parent

collect_ignore_glob = [] if importlib.util.find_spec("rocketmq") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.rocketmq)
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture
def harness(db: None) -> Iterator[object]:
    from tests.contracts.rocketmq import RocketMQHarness

    harness = RocketMQHarness()
    yield harness
    harness.close()


@pytest.fixture
def broker(harness) -> Broker:
    return harness.open()


@pytest.fixture
def acts(harness, broker: Broker) -> Acts:
    return Acts(harness, broker)


@pytest.fixture
def server() -> object:
    from tests.rocketmq_node import server

    return server()


@pytest.fixture
def fast_checks(server) -> Iterator[None]:
    """Have the server ask after a second, and each second."""
    server.set("transactionTimeOut", 1000)
    yield
    server.set("transactionTimeOut", 6000)


@pytest.fixture
def restore_checks(server) -> Iterator[None]:
    yield
    server.set("transactionCheckMax", 100)


@pytest.fixture
def past() -> Callable[[float], None]:
    """Let real time go by: the window is the broker's own clock's."""
    return time.sleep


@pytest.fixture
def stub() -> Iterator[object]:
    from tests.outbox.brokers.rocketmq.stub import Stub

    stub = Stub()
    yield stub
    stub.stop()


@pytest.fixture
def open_at() -> Iterator[Callable[..., Broker]]:
    """Open brokers at an endpoint, and close them in the end."""
    from outbox.brokers.rocketmq import RocketMQBroker
    from tests.outbox.brokers.rocketmq.stub import TOPICS

    opened: list[Broker] = []

    def open_one(endpoints: str, **options: object) -> Broker:
        opened.append(RocketMQBroker("default", {"ENDPOINTS": endpoints, **options}, TOPICS))
        return opened[-1]

    yield open_one
    for broker in opened:
        broker.close()
