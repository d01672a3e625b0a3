"""A snapshot of a database, shared by several connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from outbox.database.locks import END_IDLE_SNAPSHOT
from outbox.pipeline.spark.errors import HistoryError
from outbox.pipeline.spark.keep_alive import keep_alive

EXPORT = "SELECT pg_export_snapshot()"

# Each connection's first statement. The identifier is PostgreSQL's own: hexadecimal digits and hyphens.
JOIN = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY; SET TRANSACTION SNAPSHOT '{snapshot}'; " + END_IDLE_SNAPSHOT


@contextmanager
def exported_snapshot(url: str) -> Iterator[tuple[psycopg.Connection[Any], str]]:
    """
    Return a connection and the name of its snapshot. The snapshot can be used until the block ends.

    Raises:
        HistoryError: the database cannot be reached.
    """
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
            with keep_alive(connection):
                yield connection, row[0]
        finally:
            with suppress(psycopg.Error):  # the connection was lost, which its readers have reported
                connection.rollback()
