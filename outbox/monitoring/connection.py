"""Database connections of probes, scrapes and commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outbox import database
from outbox.database import Connection

CONNECT_SECONDS = 2  # probes and scrapes have time-outs of their own, and repeat


@contextmanager
def connected(alias: str, name: str, *, statement_seconds: int | None = None) -> Iterator[Connection]:
    """
    Yield a connection to a database that has the outbox's tables.

    Args:
        name: its `application_name`.
        statement_seconds: the time-out of each statement; connecting then takes at most 2 s. None: the time-outs of settings.

    Raises:
        NotMigrated: the database has no tables of the outbox, or is a replica.
        psycopg.OperationalError: the database cannot be reached.
    """
    limits: dict[str, Any] = {}
    if statement_seconds is not None:
        limits = {"settings": {"statement_timeout": f"{statement_seconds}s"}, "connect_timeout": CONNECT_SECONDS}
    with database.connect(alias, application_name=name, **limits) as connection:
        database.ensure_fit(alias, connection)
        yield connection
