"""Runs each test of the contract on every broker that has the features it needs."""

from collections.abc import Iterator

import pytest

from outbox.brokers import capabilities
from outbox.brokers.base import Broker
from tests.contracts.acts import Acts
from tests.contracts.harness import HARNESSES, Harness


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", 'needs(*names): run where each is a capability or a true flag; "not x": neither')
    config.addinivalue_line("markers", "unsupported: needs a feature that no installed broker has; deselected")
    config.addinivalue_line("markers", "sends_only: run on brokers without consumers, too")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "harness" in metafunc.fixturenames:
        flags = [flag for mark in metafunc.definition.iter_markers("needs") for flag in mark.args]
        if not metafunc.definition.get_closest_marker("sends_only"):
            flags.append("Receives")
        chosen = [name for name, harness in HARNESSES.items() if all(_flag(harness, flag) for flag in flags)]
        params = [pytest.param(name, marks=HARNESSES[name].marks) for name in chosen]
        metafunc.parametrize("harness", params or [pytest.param("none", marks=pytest.mark.unsupported)], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unsupported = [item for item in items if item.get_closest_marker("unsupported")]
    config.hook.pytest_deselected(items=unsupported)
    items[:] = [item for item in items if item not in unsupported]


def _flag(harness: type[Harness], flag: str) -> bool:
    name, kind = flag.removeprefix("not "), harness.broker_class
    capability = getattr(capabilities, name, None)
    is_true = capability.has(kind) if capability else getattr(harness, name, False) or getattr(kind, name, False)
    return bool(is_true) is (name == flag)


@pytest.fixture
def harness(request: pytest.FixtureRequest, db: None) -> Iterator[Harness]:
    harness = HARNESSES[request.param]()
    yield harness
    harness.close()


@pytest.fixture
def broker(harness: Harness) -> Broker:
    return harness.open()


@pytest.fixture
def acts(harness: Harness, broker: Broker) -> Acts:
    return Acts(harness, broker)
