"""One moment of a database, shared by all connections that read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from outbox.pipeline.spark.errors import HistoryError

if TYPE_CHECKING:
    import psycopg

EXPORT = "SELECT pg_export_snapshot()"

# Each connection's first statement. The identifier is PostgreSQL's own: hexadecimal digits and hyphens.
JOIN = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; SET TRANSACTION SNAPSHOT '{snapshot}'"


@contextmanager
def exported_snapshot(url: str) -> Iterator[tuple[psycopg.Connection[Any], str]]:
    """
    Give a connection and the name of its snapshot; both live until the block ends, and so must all reading.

    Raises:
        HistoryError: the database cannot be reached.
    """
    # Here: a node of a cluster that only reads files has no libpq, without which psycopg cannot be imported.
    import psycopg

    try:
        connection = psycopg.connect(url, application_name="outbox audit")
    except psycopg.Error as error:
        raise HistoryError(f"The database cannot be reached: {str(error).strip()}") from error
    with connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        row = connection.execute(EXPORT).fetchone()
        assert row is not None
        try:
            yield connection, row[0]
        finally:
            with suppress(psycopg.Error):  # it is gone: whoever read in its snapshot has said so
                connection.rollback()
