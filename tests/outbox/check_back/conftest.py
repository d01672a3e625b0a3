from collections.abc import Iterator
from typing import Any

import pytest

from outbox import database, signals
from outbox.check_back import register


@pytest.fixture
def connection(transactional_db: None) -> Iterator[database.Connection]:
    with database.connect("default") as connection:
        yield connection


@pytest.fixture
def other_connection(transactional_db: None) -> Iterator[database.Connection]:
    """A second client of the same database."""
    with database.connect("default") as connection:
        yield connection


@pytest.fixture
def resolvers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No @check_back function but the test's own."""
    monkeypatch.setattr(register, "_resolvers", {})


@pytest.fixture
def alarms() -> Iterator[list[dict[str, Any]]]:
    """What a person was told to look at."""
    heard: list[dict[str, Any]] = []

    def hear(**alarm: Any) -> None:
        heard.append(alarm)

    signals.alarm.connect(hear)
    yield heard
    signals.alarm.disconnect(hear)
