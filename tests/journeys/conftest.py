"""A database that a journey has for itself."""

import socket
from collections.abc import Iterator

import psycopg
import pytest
from django.db import connection


@pytest.fixture
def fresh_database(db: None) -> Iterator[str]:
    """Make an empty database on the tests' server, whose commits other processes read; return its URL."""
    info = connection.connection.info
    name = f"{info.dbname}_journey"  # others may test on the same server
    with psycopg.connect(info.dsn, password=info.password, dbname="postgres", autocommit=True) as server:
        server.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        server.execute(f'CREATE DATABASE "{name}"')
        yield f"postgresql://{info.user}@:{info.port}/{name}?host={info.host}"
        server.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
def free_port() -> int:
    """Find a port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
