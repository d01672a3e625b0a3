"""The databases of the outbox, and connections to them that are not Django's: plain psycopg, in autocommit."""

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

# Statements of the outbox take milliseconds. With a backlog, the planner overestimates their cost, so JIT would compile each
# execution, which takes up to seconds.
NO_JIT = {"jit": "off"}

# This setting applies to statements in autocommit; psycopg's `isolation_level` applies to transactions that psycopg begins.
READ_COMMITTED = {"default_transaction_isolation": "read committed"}

TIMEOUTS = ("lock_timeout", "idle_in_transaction_session_timeout")

# `outbox_message` has a model, so Django creates it even without migrations (in tests); the view `outbox_message_state` exists
# only after the migrations.
HAS_TABLES = "SELECT to_regclass('outbox_message') IS NOT NULL, to_regclass('outbox_message_state') IS NOT NULL"

# The schema in which a connection finds the outbox's tables through its search_path.
SCHEMA = "SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('outbox_wakeup')"

# Whether the database is a replica, whether it has the tables of the outbox, and the names of tables that look empty to this
# role. Row-level security without a policy hides all rows, and reading them raises no error.
IS_FIT = """
SELECT pg_is_in_recovery(), to_regclass('outbox_wakeup') IS NOT NULL, ARRAY(
    SELECT quote_ident(relname) FROM pg_class c
    WHERE relrowsecurity AND starts_with(relname, 'outbox_') AND NOT relispartition AND pg_table_is_visible(c.oid)
        AND row_security_active(c.oid) AND NOT EXISTS (SELECT FROM pg_policy WHERE polrelid = c.oid)
    ORDER BY relname)
"""

# SQLSTATE prefixes of errors that may go away by themselves: the connection broke (08), an operator or a shutdown ended it (57P),
# the transaction conflicted with another one (40), a lock was held (55P03).
TRANSIENT = ("08", "57P", "40", "55P03")

# Errors that an operator has to correct: tables, columns, permissions (42), a database (3D) or schema (3F), a feature (0A), a
# replica identity (55000).
MISCONFIGURED = ("0A", "3D", "3F", "42", "55000")

# Errors that do not depend on the statement's values: the misconfigured ones, a read-only database (25006), and insufficient
# resources such as disk space (53).
INDEPENDENT_OF_VALUES = (*MISCONFIGURED, "25006", "53")

# A lost host is noticed within seconds instead of hours, and reconnected within 5 s of its return.
OUTAGE_OPTIONS = {
    "connect_timeout": 5,  # seconds, like the next two
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}


def outbox_apps() -> list[AppConfig]:
    """Return the installed apps with tables of the outbox: `outbox` itself and those that extend it."""
    return [apps.get_app_config("outbox"), *extended_apps()]


def own_apps() -> list[AppConfig]:
    """Return the installed apps of this package, without users' apps that extend the outbox: those have other models, too."""
    return [config for config in outbox_apps() if config.name.partition(".")[0] == "outbox"]


def outbox_databases() -> list[str]:
    """
    Return the aliases of databases that may hold messages, without the aliases that bypass a pooler (`DIRECT_DATABASES`).

    This does not connect to the databases, so one of them may turn out to have no tables.
    """
    direct = set(_direct_databases().values())
    return [alias for alias in _allowed_databases() if alias not in direct]


def is_outbox_database(alias: str) -> bool:
    """Return whether a database may hold messages according to settings and routers."""
    return alias in _allowed_databases()


def _allowed_databases() -> list[str]:
    """
    Return the PostgreSQL databases in which routers allow the message table.

    Routers are called in a new thread, because routers of multi-tenant packages answer for the schema that is currently set on
    this thread's connection.
    """
    message_row = apps.get_model("outbox", "MessageRow")  # the models import this package, so an import would be circular
    aliases = [alias for alias in connections if connections[alias].vendor == "postgresql"]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.map(lambda alias: router.allow_migrate_model(alias, message_row), aliases)
        return [alias for alias, is_allowed in zip(aliases, answers, strict=True) if is_allowed]


def has_outbox_tables(alias: str) -> bool:
    """Return whether Django's connection to a database sees the tables of the outbox as its migrations create them."""
    has_table, is_migrated = raw(alias).execute(HAS_TABLES).fetchone() or (False, False)
    if has_table and not is_migrated:
        logger.warning(
            "The tables of the outbox in database %r were made without its migrations, so nothing can be published there. Tests "
            "that publish need the migrations: leave out pytest's option nomigrations, and MIGRATE in DATABASES' TEST.",
            alias,
        )
    return bool(is_migrated)


def explain_migrate(alias: str) -> str:
    """Return how to create the tables of the outbox in a database; with several databases, also how to exclude this one."""
    if len(connections.settings) == 1:
        return f"Run manage.py migrate --database {alias}."
    return f"Run manage.py migrate --database {alias}, or exclude it from the outbox with a database router (allow_migrate)."


def explain_missing(alias: str) -> str:
    """
    Return what to do if a connection of the outbox's own (`connect`) sees no tables of the outbox.

    Django's connection may see them, if a signal or a database backend changes its search_path.
    """
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
    Raise unless the database has this project's tables of the outbox, shows their rows, and accepts writes.

    Raises:
        NotMigrated: the database is a replica, has no such tables, or hides their rows.
        OtherProject: the tables belong to another project.
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

    Repeated statements are prepared after `OPTIONS["prepare_threshold"]` executions. Without this option, psycopg's own threshold
    applies, except behind a pooler, where no statement is prepared.

    Args:
        patience: the `lock_timeout` of this connection, and its `idle_in_transaction_session_timeout`, so that others do not
            wait longer for a frozen process. None keeps the server's settings.
        settings: settings of PostgreSQL for this connection. Behind a pooler they are set for each transaction, so that they do
            not stay on the backend.
        options: options of libpq such as `connect_timeout`; they override the database's OPTIONS.

    Raises:
        ConfigurationError: the database is not PostgreSQL.
        psycopg.OperationalError: the database cannot be reached.
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
        params.pop("prepare_threshold", None)  # this is Django's own default, and not the user's choice
    params = OUTAGE_OPTIONS | params | {"application_name": application_name, **options}
    try:
        connection = OwnConnection.connect(**params, autocommit=True)
    except psycopg.OperationalError as error:
        error.add_note(f"Database {alias!r} cannot be reached.")
        raise
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    limits = {} if patience is None else dict.fromkeys(TIMEOUTS, str(max(1, patience // timedelta(milliseconds=1))))
    with _close_on_error(connection):
        if role := wrapper.settings_dict["OPTIONS"].get("assume_role"):  # Django sets the role in the same way when it connects
            connection.execute(psycopg.sql.SQL("SET ROLE {}").format(psycopg.sql.Identifier(role)))
        connection.set_up({**NO_JIT, **READ_COMMITTED, **limits, **(settings or {})}, prepares_pooled=is_threshold_given)
    return connection


def connect_session(alias: str, **options: Any) -> OwnConnection:
    """
    Open a connection that keeps its PostgreSQL session, which session locks and LISTEN need.

    It bypasses a pooler if `OUTBOX["DIRECT_DATABASES"]` has an alias for that.

    Args:
        options: as for `connect`.

    Raises:
        ConfigurationError: the connection goes through a pooler in transaction mode, or the database is not PostgreSQL.
        psycopg.OperationalError: the database cannot be reached.
    """
    direct = direct_alias(alias)
    connection = connect(direct, **options)
    if connection.is_pooled:
        with _close_on_error(connection):
            with connect(direct) as other:
                is_stable = connection.has_stable_backend(other)
            if not is_stable:
                raise ConfigurationError(explain_pooler(alias), hint=explain_direct(alias))
            connection.use_as_session()
    return connection


def is_refusal(error: psycopg.Error) -> bool:
    """
    Return whether the database has refused a statement, for example because of a missing permission or a full disk.

    False if the database could not be reached, or if the statement may succeed the next time, as after a deadlock.
    """
    return error.sqlstate is not None and not error.sqlstate.startswith(TRANSIENT)


def refuses_all(error: BaseException) -> bool:
    """Return whether a statement would be refused whatever its values are: for a missing permission or table, or a full disk."""
    cause = error if isinstance(error, psycopg.Error) else error.__cause__  # Django's error has psycopg's as its cause
    return isinstance(cause, psycopg.Error) and (cause.sqlstate or "").startswith(INDEPENDENT_OF_VALUES)


@contextmanager
def _close_on_error(connection: OwnConnection) -> Iterator[None]:
    """Close the connection if the block raises, since the caller of `connect` then never gets it."""
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
    except ConfigurationError:  # check E001 reports the wrong setting
        return {}


def is_behind_transaction_pooler(alias: str) -> bool:
    """
    Return whether a database is behind a pooler in transaction mode, as far as that can be observed.

    Behind such a pooler, a connection that ends its transaction frees its backend for other connections. A direct connection
    keeps its backend.

    Raises:
        psycopg.Error: the database cannot be reached.
    """
    with connect(alias) as first, connect(alias) as second:
        return not first.has_stable_backend(second)


def explain_pooler(alias: str) -> str:
    """Return a sentence that says why a pooler in transaction mode cannot be used."""
    direct = direct_alias(alias)
    by = "" if direct == alias else f" by the alias {direct!r}, too,"
    return (
        f"Database {alias!r} is reached{by} through a pooler in transaction mode. Session locks and LISTEN, which relays, "
        "recorders, audits, archives and prunes need, do not work there."
    )


def explain_direct(alias: str) -> str:
    """Return a sentence that says how to bypass the pooler of a database."""
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
    """
    Return a time from the database as an aware datetime.

    With `USE_TZ = False`, Django's connections return naive datetimes in Django's default time zone.
    """
    return timezone.make_aware(at, timezone.get_default_timezone()) if timezone.is_naive(at) else at


def bound_cursor(alias: str) -> CursorWrapper:
    """
    Return a cursor that can prepare statements, if `OPTIONS["prepare_threshold"]` of the database allows it.

    Django's own cursors insert the values into the statement's text, so that PostgreSQL parses and plans it each time.
    """
    wrapper = connections[alias]
    wrapper.ensure_connection()
    # The cursor is wrapped like Django's own cursors, to get the debug log, the exceptions of django.db, and the thread check.
    wrapped: CursorWrapper = wrapper._prepare_cursor(psycopg.Cursor(wrapper.connection))  # type: ignore[attr-defined]
    return wrapped


def kept_cursor(alias: str, statement: str) -> CursorWrapper:
    """
    Return a cursor like that of `bound_cursor`, which is cached for one statement while the connection lives and never closed.

    So psycopg chooses only once how to dump the values and load the rows. The cursor keeps the last values in memory, so do
    not use it for large values.
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
    """Exclude a view from the transactions of ATOMIC_REQUESTS on all databases, so that it works while one of them is down."""
    for alias in connections:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view
