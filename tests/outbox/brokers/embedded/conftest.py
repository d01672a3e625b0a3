"""Brokers of the embedded kind, by the harness of the contract."""

from collections.abc import Iterator

import pytest

from outbox import database
from outbox.brokers.embedded import EmbeddedBroker
from tests.contracts.acts import Acts
from tests.contracts.harness import EmbeddedHarness
from tests.outbox.admin.conftest import operator

__all__ = ["operator"]


@pytest.fixture
def harness(db: None) -> Iterator[EmbeddedHarness]:
    harness = EmbeddedHarness()
    yield harness
    harness.close()


@pytest.fixture
def broker(harness: EmbeddedHarness) -> EmbeddedBroker:
    broker = harness.open()
    assert isinstance(broker, EmbeddedBroker)
    return broker


@pytest.fixture
def acts(harness: EmbeddedHarness, broker: EmbeddedBroker) -> Acts:
    return Acts(harness, broker)


@pytest.fixture
def connection(db: None) -> Iterator[database.Connection]:
    """Give a connection beside the broker's, as an operator or another process has one."""
    with database.connect("default") as connection:
        yield connection
