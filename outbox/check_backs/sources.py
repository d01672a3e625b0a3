"""The database that a half message came from. Its token has the stable id of that database."""

from __future__ import annotations

from datetime import timedelta

import psycopg

from outbox import conf, database
from outbox.logs import get_logger, log_fields

logger = get_logger("outbox.check_back")

STATEMENT_TIMEOUT = timedelta(seconds=5)  # for each statement of an answer, and for its connection

READ_SOURCE = "SELECT id, current_setting('transaction_read_only')::boolean FROM outbox_source"

_aliases: dict[str, str] = {}


def alias_of(token: str, *, otherwise: str) -> str:
    """
    Return the alias of the database that a token names.

    Args:
        otherwise: the alias for an unknown source, and for no token. `resolve` then finds that the token is of another source.
    """
    if not token:
        return otherwise
    source = token.rsplit(":", 3)[0]
    if source not in _aliases:
        _read_sources()
    return _aliases.get(source, otherwise)


def connect(alias: str) -> database.Connection:
    """Open a connection with the lock timeout of `OUTBOX["CHECK_BACK"]` and a short statement timeout."""
    times = {"lock_timeout": conf.settings().check_back.lock_timeout, "statement_timeout": STATEMENT_TIMEOUT}
    return database.connect(
        alias,
        application_name="outbox check-back",
        # 0 would mean: no limit.
        settings={name: str(max(1, round(limit.total_seconds() * 1000))) for name, limit in times.items()},
        connect_timeout=max(2, round(STATEMENT_TIMEOUT.total_seconds())),  # libpq rounds less than 2 s up to 2 s
    )


def _read_sources() -> None:
    """Read the source of every outbox database. Where a replica has an alias too, that of the primary is used."""
    for alias in database.outbox_databases():
        try:
            with connect(alias) as connection:
                row = connection.execute(READ_SOURCE).fetchone()
        except psycopg.Error as error:
            logger.warning("The source of database %r cannot be read: %s", alias, error, extra=log_fields(database=alias))
            continue
        if row is not None:
            source, is_read_only = row
            if not is_read_only or source not in _aliases:
                _aliases[source] = alias
