import socket
from collections.abc import Iterator

import pytest

from outbox import database
from outbox.check_backs import register, sources


@pytest.fixture
def connection(db: None) -> database.Connection:
    """The test's own, rolled back after it: for what one client alone can see."""
    return database.raw("default")


@pytest.fixture
def own_connection(transactional_db: None) -> Iterator[database.Connection]:
    """A connection as the check-back opens it."""
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
    monkeypatch.setattr(register, "registered", {})


@pytest.fixture(autouse=True)
def _no_known_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_aliases", {})


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
