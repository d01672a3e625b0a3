"""The connection of those who look: probes, scrapes and commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outbox import database
from outbox.database import Connection

CONNECT_SECONDS = 2  # whoever waits for the answer has a time-out of its own, and asks again


@contextmanager
def connected(alias: str, name: str, *, statement_seconds: int | None = None) -> Iterator[Connection]:
    """
    Return a connection to a database that has the outbox's tables.

    Args:
        name: what the server calls it.
        statement_seconds: no statement works longer, and connecting takes 2 s at most; None: as settings say.

    Raises:
        NotMigrated: the database has no tables of ours, or is a replica.
        psycopg.OperationalError: it cannot be reached.
    """
    limits: dict[str, Any] = {}
    if statement_seconds is not None:
        limits = {"settings": {"statement_timeout": f"{statement_seconds}s"}, "connect_timeout": CONNECT_SECONDS}
    with database.connect(alias, application_name=name, **limits) as connection:
        database.ensure_fit(alias, connection)
        yield connection
