"""Database connections of probes, scrapes and commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from outbox import database
from outbox.database import Connection
from outbox.errors import TablesLocked
from outbox.monitoring.blocking import read_blocking

CONNECT_SECONDS = 2  # probes and scrapes have time-outs of their own, and repeat
LOCK_SECONDS = 2  # the time-out of each lock
STATEMENT_SECONDS = 5  # of each statement, whatever the limit of the role is
PAGE_SECONDS = 15  # of a page; as long as a person waits for it


@contextmanager
def connected(alias: str, name: str, *, statement_seconds: int | None = STATEMENT_SECONDS) -> Iterator[Connection]:
    """
    Yield a connection to a database that has the outbox's tables.

    Args:
        name: its `application_name`.
        statement_seconds: the time-out of each statement; connecting takes at most 2 s. None, of work that may take long: the
            time-outs of settings.

    Raises:
        NotMigrated: the database has no tables of the outbox, or is a replica.
        TablesLocked: another session kept a statement waiting, or it took longer than its time-out.
        psycopg.OperationalError: the database cannot be reached.
    """
    settings = {"lock_timeout": f"{LOCK_SECONDS}s"}
    limits: dict[str, Any] = {}
    if statement_seconds is not None:
        settings["statement_timeout"] = f"{statement_seconds}s"
        limits = {"connect_timeout": CONNECT_SECONDS}
    with (
        database.connect(alias, application_name=name, settings=settings, **limits) as connection,
        named_blocker(alias, connection),
    ):
        database.ensure_fit(alias, connection)
        yield connection


@contextmanager
def bounded(alias: str, connection: Connection) -> Iterator[None]:
    """Limit the time of statements over a connection that others use, too. Raises TablesLocked, as `connected`."""
    with named_blocker(alias, connection), connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
        connection.execute(f"SET LOCAL statement_timeout = '{PAGE_SECONDS}s'")
        yield


@contextmanager
def named_blocker(alias: str, connection: Connection) -> Iterator[None]:
    """Raise TablesLocked where a statement, or its wait for a lock, takes too long. Then it may be in no transaction."""
    try:
        yield
    except psycopg.errors.QueryCanceled as error:
        hint = "See in pg_stat_activity what keeps the server busy, and try again."
        raise TablesLocked(f"A statement in database {alias!r} took longer than its time-out.", hint=hint) from error
    except psycopg.errors.LockNotAvailable as error:
        blocking = read_blocking(connection, seconds=0)
        if not blocking:
            raise TablesLocked(f"Tables of database {alias!r} were locked for {LOCK_SECONDS} s.", hint="Try again.") from error
        [first, *_] = blocking
        text = f"Tables of database {alias!r} are locked by {first.obj}. {first.msg}"
        raise TablesLocked(text, hint=first.hint or "") from error
