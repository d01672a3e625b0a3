"""Checks that query database servers: `manage.py check --database default`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

import psycopg
from django.core.checks import ERROR, WARNING, CheckMessage, Error
from django.core.checks import Warning as Caution
from django.db import NotSupportedError, connections, router

from outbox import database
from outbox.checks.decorators import LIMITS, check_each_database
from outbox.checks.settings import known_topics
from outbox.database import Connection
from outbox.database.connections import SCHEMA
from outbox.database.identity import read_identity
from outbox.errors import ConfigurationError, NotMigrated, OtherProject
from outbox.findings import Finding
from outbox.message import TopicType

# All schemas that have tables of the outbox.
SCHEMAS = "SELECT relnamespace::regnamespace::text FROM pg_class WHERE relname = 'outbox_ticket' AND relkind = 'r'"

IDLE_TRANSACTIONS = "SELECT current_setting('idle_in_transaction_session_timeout')"

TABLES = "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND pg_table_is_visible(oid)"

UNFIT = "outbox.database_unfit"

ENCODING = "SELECT current_setting('server_encoding')"


@check_each_database
def check_version(alias: str, connection: Connection) -> Iterator[CheckMessage]:
    """
    E024: The PostgreSQL server is too old.

    The outbox needs PostgreSQL 14 (`idle_session_timeout`), and Django may need a newer version, which the text names.
    """
    try:
        connections[alias].check_database_version_supported()
    except NotSupportedError as error:
        text = f"Database {alias!r}: {error}"
        yield Error(text, hint="Upgrade the server, or route the app outbox to a newer one.", id="outbox.E024")


# The migrations of 0.1.0 had the same names, so Django takes the current ones for applied.
NOTHING_TO_MIGRATE = (
    "If there is nothing to migrate, the tables were dropped, or are of version 0.1.0. In the first case restore them; in the "
    "second, remove the old ones with manage.py migrate outbox zero, run with the release that created them."
)


@check_each_database
def check_fit(alias: str, connection: Connection) -> Iterator[CheckMessage]:
    """
    database_unfit: A database lacks tables of the outbox, is a replica, hides their rows, or they belong to another project.

    Nothing can be published, relayed or consumed in this database: run `manage.py migrate`, or do what the hint says. Missing
    tables are only a warning, since checks also run before the first `migrate`. A database in which routers do not allow the
    outbox's models needs no tables. Each project needs a database or a schema of its own; if two settings modules are one
    project, set the same `OUTBOX["PROJECT"]` in both.
    """
    is_migrating = "".join(sys.argv[1:2]).startswith("migrate")  # also migrate_schemas; both run the checks before they migrate
    subject = f"database {alias!r}"
    try:
        with suppress(ConfigurationError):  # E001 reports it
            database.ensure_fit(alias, connection)
    except NotMigrated as error:
        if isinstance(error, OtherProject) or not is_migrating:
            level = ERROR if isinstance(error, OtherProject) else WARNING
            yield Finding(UNFIT, subject, error.message.replace(f"Database {alias!r}", "It"), error.hint, level=level)
        return
    models = [model for app in database.outbox_apps() for model in app.get_models() if model._meta.managed]
    wanted = {model._meta.db_table for model in models if router.allow_migrate_model(alias, model)}
    missing = sorted(wanted - {name for (name,) in connection.execute(TABLES)})
    if missing and not is_migrating:
        hint = f"{database.explain_migrate(alias)} {NOTHING_TO_MIGRATE}"
        yield Finding(UNFIT, subject, f"It lacks the tables {', '.join(missing)}.", hint)


@check_each_database
def check_encoding(alias: str, connection: Connection) -> Iterator[CheckMessage]:
    """
    E055: The database is not encoded in UTF-8.

    Keys, headers and errors may have characters that such a database cannot store. A handler's error that cannot be stored is not
    counted, so its message would be retried forever. Django expects UTF-8, too: create a database with `ENCODING 'UTF8'`, and
    move the tables to it.
    """
    (encoding,) = connection.execute(ENCODING).fetchone() or ("",)
    if encoding != "UTF8":
        yield Error(
            f"Database {alias!r} is encoded in {encoding}, which cannot store all keys, headers and errors.",
            hint="Move the tables to a database that was created with ENCODING 'UTF8', which Django expects, too.",
            id="outbox.E055",
        )


@check_each_database
def check_pooler(alias: str, connection: Connection) -> Iterator[CheckMessage]:
    """
    W025: The database is behind a pooler in transaction mode, and no alias bypasses it.

    Publishing, half first, consumers and the check-back endpoint work. Relays, recorders, audits, archives and pruning need a
    session of their own, for session locks and LISTEN, and do not start: add the line that the hint shows. If none of them runs
    with these settings, silence this check.
    """
    if database.is_behind_transaction_pooler(database.direct_alias(alias)):
        yield Caution(database.explain_pooler(alias), hint=database.explain_direct(alias), id="outbox.W025")


@check_each_database
def check_direct_databases(alias: str, connection: Connection) -> Iterator[CheckMessage]:
    """
    E045: An alias of `OUTBOX["DIRECT_DATABASES"]` connects to another database than the one whose pooler it should bypass.

    Relays would search the other database and find no messages. Correct the alias's NAME, HOST or PORT in DATABASES.
    """
    direct = database.direct_alias(alias)
    if direct != alias and _source_of(direct) != _source_of(alias):
        yield Error(
            f"{direct!r} should bypass the pooler of database {alias!r}, but connects to another database.",
            hint=f"Correct DATABASES[{direct!r}], so that it connects to the database with the messages of {alias!r}.",
            id="outbox.E045",
        )


@check_each_database
def check_idle_transactions(alias: str, connection: Connection) -> Iterator[CheckMessage]:
    """
    W049: There are ordered topics, and the database does not end idle transactions.

    A publisher of a key waits until the previous publisher of the key has committed. While that process is frozen in its
    transaction, all later publishers of the key wait. Let PostgreSQL end such a transaction.
    """
    if not any(topic.type is TopicType.FIFO for _, topic, _ in known_topics()):
        return
    with connections[alias].cursor() as cursor:  # Django's connection, which publishers use
        cursor.execute(IDLE_TRANSACTIONS)
        if cursor.fetchone() != ("0",):
            return
    yield Caution(
        f"Database {alias!r} does not end idle transactions. A publisher that is frozen in one blocks all other "
        "publishers of its key.",
        hint=f'Set DATABASES[{alias!r}]["OPTIONS"]["options"] = "-c idle_in_transaction_session_timeout=60s", or, '
        "in PostgreSQL, ALTER ROLE ... SET idle_in_transaction_session_timeout = '60s'.",
        id="outbox.W049",
    )


@check_each_database
def check_schemas(alias: str, connection: Connection) -> Iterator[CheckMessage]:
    """
    E034: The outbox has tables in a schema that no database in settings uses.

    No relay sees messages that were written to that schema. Keep the outbox out of tenants' schemas (django-tenants: in
    SHARED_APPS only), or add an alias to DATABASES for each schema, with its search_path in OPTIONS.
    """
    schemas = {schema for (schema,) in connection.execute(SCHEMAS)}
    unread = schemas - {_schema_of(other) for other in database.outbox_databases() if _address(other) == _address(alias)}
    if unread:
        text = f"Database {alias!r} has tables of the outbox in the schemas {', '.join(sorted(unread))}, which no relay reads."
        hint = (
            "Drop them and keep the outbox in a schema that all connections see, or add an alias to DATABASES for each schema, "
            "with its search_path in OPTIONS."
        )
        yield Error(text, hint=hint if _schema_of(alias) else database.explain_missing(alias), id="outbox.E034")


def _source_of(alias: str) -> str | None:
    """Return the stable id of a database's outbox; None if the database has no tables of the outbox."""
    try:
        with database.connect(alias, settings=LIMITS) as connection:
            return read_identity(connection).source
    except psycopg.errors.UndefinedTable:
        return None


def _schema_of(alias: str) -> str | None:
    with database.connect(alias) as connection:
        row = connection.execute(SCHEMA).fetchone()
    return row[0] if row else None


def _address(alias: str) -> tuple[str, ...]:
    settings = connections[alias].settings_dict
    return tuple(str(settings[name]) for name in ("HOST", "PORT", "NAME"))
