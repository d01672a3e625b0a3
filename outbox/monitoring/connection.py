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

CONNECT_SECONDS = 2  # short, since probes and scrapes have timeouts of their own, and repeat
LOCK_SECONDS = 2  # the timeout of each wait for a lock
STATEMENT_SECONDS = 5  # the timeout of each statement; replaces that of the role
PAGE_SECONDS = 15  # the timeout of each statement for a page, for which a person waits

# One statement, since a connection with server-side binding prepares each, and cannot prepare several as one.
LIMIT = """
SELECT set_config('lock_timeout', %s, true), set_config('statement_timeout', %s, true), set_config('jit', 'off', true)
"""


@contextmanager
def connected(alias: str, name: str, *, statement_seconds: int | None = STATEMENT_SECONDS) -> Iterator[Connection]:
    """
    Yield a connection to a database that has the outbox's tables.

    Args:
        name: the `application_name` of the session.
        statement_seconds: the timeout of each statement; connecting takes at most 2 s. None for work that may take long: the
            timeouts of the project's settings apply.

    Raises:
        NotMigrated: the database has no tables of the outbox, or is a replica.
        TablesLocked: another session kept a statement waiting, or a statement took longer than its timeout.
        psycopg.OperationalError: the database cannot be reached.
    """
    settings = {"lock_timeout": f"{LOCK_SECONDS}s"}
    limits: dict[str, Any] = {}
    if statement_seconds is not None:
        settings["statement_timeout"] = f"{statement_seconds}s"
        limits = {"connect_timeout": CONNECT_SECONDS}
    with (
        database.connect(alias, application_name=name, settings=settings, **limits) as connection,
        name_blocker(alias, connection),
    ):
        database.ensure_fit(alias, connection)
        yield connection


@contextmanager
def bounded(alias: str, connection: Connection) -> Iterator[None]:
    """
    Limit the time of statements over a connection that other code uses, too, and do not compile them (JIT), as in `connected`.

    Raises:
        TablesLocked: as in `connected`.
    """
    with name_blocker(alias, connection), connection.transaction():
        connection.execute(LIMIT, [f"{LOCK_SECONDS}s", f"{PAGE_SECONDS}s"])
        yield


@contextmanager
def name_blocker(alias: str, connection: Connection) -> Iterator[None]:
    """
    Raise TablesLocked, with the blocking session, if a statement or its wait for a lock takes too long.

    The connection is queried for that session after the error. So enter this outside a transaction block, which the error aborts.
    """
    try:
        yield
    except psycopg.errors.QueryCanceled as error:
        hint = "See in pg_stat_activity what keeps the server busy, and try again."
        raise TablesLocked(f"A statement in database {alias!r} took longer than its timeout.", hint=hint) from error
    except psycopg.errors.LockNotAvailable as error:
        blocking = read_blocking(connection, seconds=0)
        if not blocking:
            raise TablesLocked(f"Tables of database {alias!r} were locked for {LOCK_SECONDS} s.", hint="Try again.") from error
        [first, *_] = blocking
        text = f"Tables of database {alias!r} are locked by {first.obj}. {first.msg}"
        raise TablesLocked(text, hint=first.hint or "") from error
