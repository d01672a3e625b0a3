"""Databases as their servers are: `manage.py check --database default`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution
from django.db import Error as DatabaseError
from django.db import NotSupportedError, connections

from outbox import conf, database
from outbox.errors import ConfigurationError
from outbox.message import TopicType

# Schemas that hold the outbox, and the one that this connection sees.
SCHEMAS = "SELECT relnamespace::regnamespace::text FROM pg_class WHERE relname = 'outbox_ticket' AND relkind = 'r'"
IDLE_TRANSACTIONS = "SELECT current_setting('idle_in_transaction_session_timeout')"
SCHEMA = "SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('outbox_ticket')"

SOURCE = "SELECT id FROM outbox_source"


def check_version(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """
    E024: The PostgreSQL server is too old.

    The outbox needs PostgreSQL 14 (`idle_session_timeout`), and Django may need a newer one; the text names it.
    """

    def look(alias: str) -> list[CheckMessage]:
        try:
            connections[alias].check_database_version_supported()
        except NotSupportedError as error:
            text = f"Database {alias!r}: {error}"
            return [Error(text, hint="Upgrade the server, or route the app outbox to a newer one.", id="outbox.E024")]
        return []

    return _look_at(databases, look)


def check_pooler(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """
    W025: A pooler in transaction mode stands before the database, and no alias leads around it.

    Publishing, half first, consumers and the check-back endpoint work. Relays, recorders, audits, archives and prunes need a
    session of their own, for locks and LISTEN, and refuse to start: write the line that the hint shows. Where none of them
    runs with these settings, silence it.
    """

    def look(alias: str) -> list[CheckMessage]:
        if not database.is_behind_transaction_pooler(database.direct_alias(alias)):
            return []
        return [Caution(database.explain_pooler(alias), hint=database.name_direct(alias), id="outbox.W025")]

    return _look_at(databases, look)


def check_direct_databases(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """
    E045: An alias of `OUTBOX["DIRECT_DATABASES"]` leads to another database than the one whose pooler it goes around.

    Relays would look there, and find no message. Correct its NAME, HOST or PORT in DATABASES.
    """

    def look(alias: str) -> list[CheckMessage]:
        direct = database.direct_alias(alias)
        if direct == alias or _source_of(direct) == _source_of(alias):
            return []
        return [
            Error(
                f"Database {alias!r} and {direct!r}, which is to lead around its pooler, are not the same.",
                hint=f"Have DATABASES[{direct!r}] lead to the database that holds the messages of {alias!r}.",
                id="outbox.E045",
            )
        ]

    return _look_at(databases, look)


def check_idle_transactions(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """
    W049: Topics keep order, and the database never ends a transaction that is idle.

    A publisher of a key waits until its last publisher has committed. Where that one's process is frozen in its transaction, all
    later messages of the key wait as long. Let PostgreSQL end such a transaction.
    """
    try:
        has_order = any(conf.topic_settings(name).type is TopicType.FIFO for name in conf.settings().topics)
    except ConfigurationError:  # E001 or E003 has said it
        return []
    if not has_order:
        return []

    def look(alias: str) -> list[CheckMessage]:
        with connections[alias].cursor() as cursor:
            cursor.execute(IDLE_TRANSACTIONS)
            if cursor.fetchone() != ("0",):
                return []
        return [
            Caution(
                f"Database {alias!r} never ends a transaction that is idle. A publisher that is frozen in one keeps all "
                "others of its key waiting.",
                hint=f'Set DATABASES[{alias!r}]["OPTIONS"]["options"] = "-c idle_in_transaction_session_timeout=60s", or, '
                "in PostgreSQL, ALTER ROLE ... SET idle_in_transaction_session_timeout = '60s'.",
                id="outbox.W049",
            )
        ]

    return _look_at(databases, look)


def check_schemas(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """
    E034: The outbox has tables in a schema to which no database of the settings leads.

    Messages that a changed search_path has written there are seen by no relay. Keep the outbox out of the tenants' schemas
    (django-tenants: in SHARED_APPS alone), or give each an alias in DATABASES whose OPTIONS set its search_path.
    """

    def look(alias: str) -> list[CheckMessage]:
        with database.connect(alias) as connection:
            schemas = {schema for (schema,) in connection.execute(SCHEMAS)}
        lost = schemas - {_schema_of(other) for other in database.outbox_databases() if _place(other) == _place(alias)}
        if not lost:
            return []
        return [
            Error(
                f"Database {alias!r} has tables of the outbox in the schemas {', '.join(sorted(lost))}, where no relay looks.",
                hint="Drop them and keep the outbox in a schema that all connections see, or name each by the search_path of "
                "an alias in DATABASES.",
                id="outbox.E034",
            )
        ]

    return _look_at(databases, look)


def _source_of(alias: str) -> str | None:
    """Return the stable id of a database's outbox; None where it has none."""
    try:
        with database.connect(alias) as connection:
            row = connection.execute(SOURCE).fetchone()
    except psycopg.errors.UndefinedTable:
        return None
    return row[0] if row else None


def _schema_of(alias: str) -> str | None:
    with database.connect(alias) as connection:
        row = connection.execute(SCHEMA).fetchone()
    return row[0] if row else None


def _place(alias: str) -> tuple[str, ...]:
    settings = connections[alias].settings_dict
    return tuple(str(settings[name]) for name in ("HOST", "PORT", "NAME"))


def _look_at(aliases: Sequence[str] | None, look: Callable[[str], list[CheckMessage]]) -> list[CheckMessage]:
    """Look at the outbox's databases among those asked about. One that is away is not the checks' to tell."""
    found: list[CheckMessage] = []
    for alias in set(aliases or ()) & set(database.outbox_databases()):
        try:
            found.extend(look(alias))
        except (DatabaseError, psycopg.Error):
            continue
    return found
