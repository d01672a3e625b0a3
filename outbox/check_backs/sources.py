"""Which of Django's databases a half message came from: its token carries the stable id of one."""

from __future__ import annotations

import psycopg

from outbox import conf, database
from outbox.logs import get_logger, log_fields

logger = get_logger("outbox.check_back")

READ_SOURCE = "SELECT id, current_setting('transaction_read_only')::boolean FROM outbox_source"

_aliases: dict[str, str] = {}


def alias_of(token: str, *, otherwise: str) -> str:
    """
    Return the alias of the database that a token names.

    Args:
        otherwise: for a token that names none we know. `resolve` finds there that the token is another source's.
    """
    if not token:
        return otherwise
    source = token.rsplit(":", 3)[0]
    if source not in _aliases:
        _read_sources()
    return _aliases.get(source, otherwise)


def connect(alias: str) -> database.Connection:
    """Open a connection that neither waits for a lock nor works longer than `OUTBOX["CHECK_BACK"]` allows."""
    limits = conf.settings().check_back
    times = {"lock_timeout": limits.lock_timeout, "statement_timeout": limits.statement_timeout}
    return database.connect(
        alias,
        application_name="outbox check-back",
        # 0 would mean: no limit.
        settings={name: str(max(1, round(limit.total_seconds() * 1000))) for name, limit in times.items()},
        connect_timeout=max(2, round(limits.statement_timeout.total_seconds())),  # libpq takes less than 2 s for 2 s
    )


def _read_sources() -> None:
    """Ask every outbox database for its source. Where a replica has an alias, too, the primary's counts."""
    for alias in database.outbox_databases():
        try:
            with connect(alias) as connection:
                row = connection.execute(READ_SOURCE).fetchone()
        except psycopg.Error as error:
            logger.warning("Database %r does not say which source it is: %s", alias, error, extra=log_fields(database=alias))
            continue
        if row is not None:
            source, is_read_only = row
            if not is_read_only or source not in _aliases:
                _aliases[source] = alias
