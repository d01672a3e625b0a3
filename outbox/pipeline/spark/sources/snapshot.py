"""One moment of a database, shared by all connections that read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from outbox.database.locks import END_IDLE_SNAPSHOT
from outbox.pipeline.spark.errors import HistoryError
from outbox.pipeline.spark.keep import kept_alive

if TYPE_CHECKING:
    import psycopg

EXPORT = "SELECT pg_export_snapshot()"

# Each connection's first statement. The identifier is PostgreSQL's own: hexadecimal digits and hyphens.
JOIN = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; SET TRANSACTION SNAPSHOT '{snapshot}'; " + END_IDLE_SNAPSHOT


@contextmanager
def exported_snapshot(url: str) -> Iterator[tuple[psycopg.Connection[Any], str]]:
    """
    Return a connection and the name of its snapshot; both live until the block ends, and so must all reading.

    Raises:
        HistoryError: the database cannot be reached.
    """
    import psycopg  # a cluster that reads files only does without

    try:
        connection = psycopg.connect(url, application_name="outbox audit")
    except psycopg.Error as error:
        raise HistoryError(f"The database cannot be reached: {str(error).strip()}") from error
    with connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        row = connection.execute(EXPORT).fetchone()
        assert row is not None
        connection.execute(END_IDLE_SNAPSHOT)
        try:
            with kept_alive(connection):
                yield connection, row[0]
        finally:
            with suppress(psycopg.Error):  # it is gone: whoever read in its snapshot has said so
                connection.rollback()
