"""The databases of the outbox, and connections to them beside Django's: plain psycopg, in autocommit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, ParamSpec, TypeVar

import psycopg
import psycopg.sql
from django.apps import AppConfig, apps
from django.db import DatabaseError, connections, router, transaction
from django.db.backends.postgresql.psycopg_any import is_psycopg3
from django.db.backends.utils import CursorWrapper
from django.utils import timezone

from outbox import conf
from outbox.database.identity import require_own_tables
from outbox.database.own_connection import OwnConnection
from outbox.errors import ConfigurationError, NotMigrated
from outbox.extensions import extended_apps
from outbox.logs import get_logger

logger = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

Connection = psycopg.Connection[tuple[Any, ...]]

# Statements of the outbox take milliseconds. With a backlog, the planner overestimates their cost, and JIT would compile them
# each time, which takes up to seconds.
NO_JIT = {"jit": "off"}

# This is for statements in autocommit; psycopg's `isolation_level` is for the transactions that it begins.
READ_COMMITTED = {"default_transaction_isolation": "read committed"}

TIMEOUTS = ("lock_timeout", "idle_in_transaction_session_timeout")

# Some tables have a model, and may have been made without the migrations: without partitions, defaults, views.
HAS_TABLES = "SELECT to_regclass('outbox_message') IS NOT NULL, to_regclass('outbox_message_state') IS NOT NULL"

# The schema whose outbox a connection sees.
SCHEMA = "SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('outbox_wakeup')"

# Whether the database is a replica, whether it has the tables of the outbox, and those that look empty to this role: row-level
# security without a policy hides all rows, and raises no error where they are read.
IS_FIT = r"""
SELECT pg_is_in_recovery(), to_regclass('outbox_wakeup') IS NOT NULL, ARRAY(
    SELECT quote_ident(relname) FROM pg_class c
    WHERE relrowsecurity AND relname LIKE 'outbox\_%' AND NOT relispartition AND pg_table_is_visible(c.oid)
        AND row_security_active(c.oid) AND NOT EXISTS (SELECT FROM pg_policy WHERE polrelid = c.oid)
    ORDER BY relname)
"""

# SQLSTATE, by its beginning: the connection broke, an operator ended it, a conflict with another transaction, a lock was held.
NO_REFUSALS = ("08", "57P", "40", "55P03")

# Errors that an operator has to correct: tables, columns, permissions (42), a database (3D) or schema (3F), a feature (0A), a
# replica identity (55000). And errors with any values, too: writes to a read-only database, anything without resources (53).
MISCONFIGURED = ("0A", "3D", "3F", "42", "55000")
REFUSES_ALL = (*MISCONFIGURED, "25006", "53")

# A lost host is noticed within seconds instead of hours, and reconnected within 5 s of its return.
OUTAGE_OPTIONS = {
    "connect_timeout": 5,  # seconds, as the next two
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}


def outbox_apps() -> list[AppConfig]:
    """Return the installed apps with tables of the outbox: `outbox` itself and those that extend it."""
    return [apps.get_app_config("outbox"), *extended_apps()]


def own_apps() -> list[AppConfig]:
    """Return the installed apps of this package. An app of a user's that extends the outbox has other models, too."""
    return [config for config in outbox_apps() if config.name.partition(".")[0] == "outbox"]


def outbox_databases() -> list[str]:
    """
    Return the aliases of databases that may hold messages, without aliases that bypass a pooler.

    No connection is made, so a database may turn out to have no tables.
    """
    direct = set(_direct_databases().values())
    return [alias for alias in _allowed_databases() if alias not in direct]


def is_outbox_database(alias: str) -> bool:
    """Return whether a database may hold messages, by settings and routers."""
    return alias in _allowed_databases()


def _allowed_databases() -> list[str]:
    """
    Return the PostgreSQL databases in which routers allow the message table.

    Routers are asked in a new thread: those of tenants answer for the schema that is set on this thread's connection.
    """
    message_row = apps.get_model("outbox", "MessageRow")  # models import this package
    aliases = [alias for alias in connections if connections[alias].vendor == "postgresql"]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.map(lambda alias: router.allow_migrate_model(alias, message_row), aliases)
        return [alias for alias, is_allowed in zip(aliases, answers, strict=True) if is_allowed]


def has_outbox_tables(alias: str) -> bool:
    """Return whether Django's connection to a database sees the tables of the outbox, as its migrations make them."""
    has_table, is_migrated = raw(alias).execute(HAS_TABLES).fetchone() or (False, False)
    if has_table and not is_migrated:
        logger.warning(
            "The tables of the outbox in database %r were made without its migrations, so nothing can be published there. Tests "
            "that publish need the migrations: leave out pytest's option nomigrations, and MIGRATE in DATABASES' TEST.",
            alias,
        )
    return bool(is_migrated)


def explain_migrate(alias: str) -> str:
    """Return how a database gets the tables of the outbox; where there are several, also how to do without them there."""
    if len(connections.settings) == 1:
        return f"Run manage.py migrate --database {alias}."
    return f"Run manage.py migrate --database {alias}, or exclude it from the outbox with a database router (allow_migrate)."


def explain_missing(alias: str) -> str:
    """Return what to do about tables that a connection of the outbox's own does not see. Django's connection may see them."""
    with suppress(DatabaseError), connections[alias].cursor() as cursor:
        cursor.execute(SCHEMA)
        for (schema,) in cursor.fetchall():
            return (
                f"A signal or a database backend leads Django's connections to the schema {schema!r}, where the tables are, but "
                "not the outbox's own: set the search_path of its role, or "
                f'DATABASES[{alias!r}]["OPTIONS"]["options"] = "-c search_path={schema},public".'
            )
    return explain_migrate(alias)


def ensure_fit(alias: str, connection: Connection) -> None:
    """
    Raise unless the database has the tables of the outbox, of this project, shows their rows, and accepts writes.

    Raises:
        NotMigrated: it is a replica, or has no such tables, or hides their rows.
        OtherProject: they belong to another project.
    """
    is_replica, has_tables, hidden = connection.execute(IS_FIT).fetchone() or (False, False, [])
    if is_replica:
        raise NotMigrated(
            f"Database {alias!r} is a replica and accepts no writes.",
            hint="Exclude it from the outbox with a database router (allow_migrate), or correct its HOST.",
        )
    if not has_tables:
        raise NotMigrated(f"Database {alias!r} has no tables of the outbox.", hint=explain_missing(alias))
    if hidden:
        raise NotMigrated(
            f"Database {alias!r} hides the rows of {', '.join(hidden)} from role {connection.info.user!r}: they have row-level "
            "security, and no policy.",
            hint=" ".join(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY;" for table in hidden),
        )
    require_own_tables(alias, connection)


def connect(
    alias: str,
    *,
    application_name: str = "outbox",
    patience: timedelta | None = None,
    settings: Mapping[str, str] | None = None,
    **options: Any,
) -> OwnConnection:
    """
    Open a connection to one of Django's databases, in autocommit and READ COMMITTED, with tuples as rows.

    Repeated statements are prepared as `OPTIONS["prepare_threshold"]` of the database says; by default after psycopg's own
    threshold, and not at all behind a pooler.

    Args:
        patience: the `lock_timeout` of this connection, and its `idle_in_transaction_session_timeout`, so that others do not
            wait longer for a frozen process. None: the settings of the server.
        settings: settings of PostgreSQL for this connection. They do not stay on the backend of a pooler.
        options: options of libpq such as `connect_timeout`; they override the database's OPTIONS.

    Raises:
        ConfigurationError: the database is not PostgreSQL.
        psycopg.OperationalError: it cannot be reached.
    """
    wrapper = connections[alias]
    if wrapper.vendor != "postgresql" or not is_psycopg3:
        raise ConfigurationError(
            f"Database {alias!r} is {wrapper.vendor}; the outbox needs PostgreSQL 14 or later with psycopg 3.",
            hint='Set its ENGINE to "django.db.backends.postgresql".',
        )
    params = wrapper.get_connection_params()
    for name in ("cursor_factory", "context", "server_side_binding"):
        params.pop(name, None)
    is_threshold_given = "prepare_threshold" in wrapper.settings_dict["OPTIONS"]
    if not is_threshold_given:
        params.pop("prepare_threshold", None)  # Django's own default, not the user's
    params = OUTAGE_OPTIONS | params | {"application_name": application_name, **options}
    try:
        connection = OwnConnection.connect(**params, autocommit=True)
    except psycopg.OperationalError as error:
        error.add_note(f"Database {alias!r} cannot be reached.")
        raise
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    limits = {} if patience is None else dict.fromkeys(TIMEOUTS, str(max(1, patience // timedelta(milliseconds=1))))
    with _closed_by_an_error(connection):
        if role := wrapper.settings_dict["OPTIONS"].get("assume_role"):  # as Django does when it connects
            connection.execute(psycopg.sql.SQL("SET ROLE {}").format(psycopg.sql.Identifier(role)))
        connection.set_up({**NO_JIT, **READ_COMMITTED, **limits, **(settings or {})}, prepares_pooled=is_threshold_given)
    return connection


def connect_session(alias: str, **options: Any) -> OwnConnection:
    """
    Open a connection with a session of its own, as session locks and LISTEN need, by `OUTBOX["DIRECT_DATABASES"]`.

    Args:
        options: as for `connect`.

    Raises:
        ConfigurationError: the connection goes through a pooler in transaction mode; or the database is not PostgreSQL.
        psycopg.OperationalError: it cannot be reached.
    """
    direct = direct_alias(alias)
    connection = connect(direct, **options)
    if connection.is_pooled:
        with _closed_by_an_error(connection):
            with connect(direct) as other:
                is_own = connection.keeps_session(other)
            if not is_own:
                raise ConfigurationError(explain_pooler(alias), hint=name_direct(alias))
            connection.keep_session()
    return connection


def is_refusal(error: psycopg.Error) -> bool:
    """
    Return whether the database has refused a statement, such as for a missing permission or a full disk.

    It has not if it was away, or if the statement may succeed the next time, as after a deadlock.
    """
    return error.sqlstate is not None and not error.sqlstate.startswith(NO_REFUSALS)


def refuses_all(error: BaseException) -> bool:
    """Return whether a statement would be refused with any values: for a missing permission or table, or a full disk."""
    cause = error if isinstance(error, psycopg.Error) else error.__cause__  # Django's error has psycopg's as its cause
    return isinstance(cause, psycopg.Error) and (cause.sqlstate or "").startswith(REFUSES_ALL)


@contextmanager
def _closed_by_an_error(connection: OwnConnection) -> Iterator[None]:
    """Close the connection after an error, since the caller does not get it."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def direct_alias(alias: str) -> str:
    """Return the alias that bypasses a database's pooler; the database's own alias if there is none."""
    return _direct_databases().get(alias, alias)


def _direct_databases() -> Mapping[str, str]:
    try:
        return conf.settings().direct_databases
    except ConfigurationError:  # check E001 reports it
        return {}


def is_behind_transaction_pooler(alias: str) -> bool:
    """
    Return whether a database is behind a pooler in transaction mode, as far as that can be observed.

    With such a pooler, a connection that has ended its transaction passes its backend on to another one. Direct connections
    never do.

    Raises:
        psycopg.Error: the database cannot be reached.
    """
    with connect(alias) as first, connect(alias) as second:
        return not first.keeps_session(second)


def explain_pooler(alias: str) -> str:
    """Return a sentence that says why a pooler in transaction mode cannot be used."""
    direct = direct_alias(alias)
    by = "" if direct == alias else f" by the alias {direct!r}, too,"
    return (
        f"Database {alias!r} is reached{by} through a pooler in transaction mode. Session locks and LISTEN, which relays, "
        "recorders, audits, archives and prunes need, do not work there."
    )


def name_direct(alias: str) -> str:
    """Return a sentence that says how to bypass the pooler."""
    direct = direct_alias(alias)
    if direct != alias:
        return f"Let DATABASES[{direct!r}] connect to PostgreSQL directly."
    return (
        'Add an alias to DATABASES that connects to PostgreSQL directly, for example DATABASES["direct"], and name it: '
        f'OUTBOX["DIRECT_DATABASES"] = {{"{alias}": "direct"}}.'
    )


def raw(alias: str) -> Connection:
    """Return the psycopg connection under Django's own, connected; statements on it join the caller's transaction."""
    wrapper = connections[alias]
    wrapper.ensure_connection()
    return wrapper.connection  # type: ignore[no-any-return]


def aware(at: datetime) -> datetime:
    """Return a time with its zone: with `USE_TZ = False`, those of Django's connections have none and are in that of Django."""
    return timezone.make_aware(at, timezone.get_default_timezone()) if timezone.is_naive(at) else at


def bound_cursor(alias: str) -> CursorWrapper:
    """
    Return a cursor that can prepare statements, where `OPTIONS["prepare_threshold"]` of the database allows it.

    Django's own cursors insert the values into the statement's text, so that PostgreSQL parses and plans it each time.
    """
    wrapper = connections[alias]
    wrapper.ensure_connection()
    # Wrapped like Django's own cursors: with the debug log, the exceptions of django.db, and the check of the thread.
    wrapped: CursorWrapper = wrapper._prepare_cursor(psycopg.Cursor(wrapper.connection))  # type: ignore[attr-defined]
    return wrapped


def kept_cursor(alias: str, statement: str) -> CursorWrapper:
    """
    Return a cursor like that of `bound_cursor`, cached for one statement for the life of the connection. It is never closed.

    psycopg then chooses only once how to dump the values and load the rows. The cursor keeps the last values in memory, so do
    not use it for large ones.
    """
    wrapper = connections[alias]
    wrapper.ensure_connection()
    kept = wrapper.connection.__dict__.setdefault("outbox_cursors", {})
    if (cursor := kept.get(statement)) is None:
        cursor = kept[statement] = psycopg.Cursor(wrapper.connection)
    wrapped: CursorWrapper = wrapper._prepare_cursor(cursor)  # type: ignore[attr-defined]
    return wrapped


def drop_if_lost(alias: str) -> None:
    """Close Django's connection if it no longer works; the next statement opens another."""
    wrapper = connections[alias]
    if wrapper.connection is not None and not wrapper.is_usable():
        wrapper.close()


def outside_transactions(view: Callable[P, R]) -> Callable[P, R]:
    """Exclude a view from the transactions of ATOMIC_REQUESTS, so that it works while a database is down."""
    for alias in connections:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view
