"""Fixtures for the embedded broker, with the harness of the contract suite."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outbox import database
from outbox.embedded import EmbeddedBroker
from tests.contracts.acts import Acts
from tests.contracts.harness import EmbeddedHarness

LINE = "The tables of the embedded broker are missing in database 'default'. Run manage.py migrate --database default."


@contextmanager
def missing(connection: database.Connection, table: str) -> Iterator[None]:
    """Rename a table, as if the broker's app were not migrated."""
    connection.execute(f"ALTER TABLE {table} RENAME TO elsewhere")
    try:
        yield
    finally:
        connection.execute(f"ALTER TABLE elsewhere RENAME TO {table}")


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
    """Return a second connection, like that of an operator or another process."""
    with database.connect("default") as connection:
        yield connection


@pytest.fixture
def unpolled(harness: EmbeddedHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.without_polls(monkeypatch)
