"""Which databases are ours, and connections of our own beside Django's: autocommit, plain psycopg."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import psycopg
from django.apps import AppConfig, apps
from django.db import connections, router, transaction
from django.db.backends.postgresql.psycopg_any import is_psycopg3
from django.db.backends.utils import CursorWrapper

from outbox import conf
from outbox.database.own_connection import OwnConnection
from outbox.errors import ConfigurationError, NotMigrated

P = ParamSpec("P")
R = TypeVar("R")

Connection = psycopg.Connection[tuple[Any, ...]]

# Our statements take milliseconds. What the planner thinks they could cost with a backlog has them compiled each time,
# which takes up to seconds.
NO_JIT = {"jit": "off"}

# Of statements in autocommit; psycopg's own level is that of the transactions that it begins.
READ_COMMITTED = {"default_transaction_isolation": "read committed"}

WAITS = ("lock_timeout", "idle_in_transaction_session_timeout")

HAS_TABLES = "SELECT to_regclass('outbox_topic') IS NOT NULL AND to_regclass('outbox_message') IS NOT NULL"

# Is the database a replica, and has it our tables?
IS_FIT = "SELECT pg_is_in_recovery(), to_regclass('outbox_wakeup') IS NOT NULL"

# A host that vanished is noticed in seconds, not in hours: within 5 s of its return there is a new connection.
OUTAGE_OPTIONS = {
    "connect_timeout": 5,  # seconds, as the next two
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}


def outbox_apps() -> list[AppConfig]:
    """Return the installed apps of the outbox: its own, and those beside it."""
    return [config for config in apps.get_app_configs() if f"{config.name}.".startswith("outbox.")]


def outbox_databases() -> list[str]:
    """
    List the databases that may hold messages, each once: not by the alias that goes around its pooler.

    None is asked: whether it has the tables shows when somebody comes there.
    """
    direct = set(_direct_databases().values())
    return [alias for alias in connections if alias not in direct and is_outbox_database(alias)]


def is_outbox_database(alias: str) -> bool:
    """Return whether a database may hold messages, by settings and routers."""
    message_row = apps.get_model("outbox", "MessageRow")  # this room is below models
    return connections[alias].vendor == "postgresql" and router.allow_migrate_model(alias, message_row)


def has_outbox_tables(alias: str) -> bool:
    """Return whether a database has the tables of the outbox, as far as Django's connection sees."""
    return raw(alias).execute(HAS_TABLES).fetchone() == (True,)


def ensure_fit(alias: str, connection: Connection) -> None:
    """Raise NotMigrated unless the database has the tables of the outbox and takes writes."""
    is_replica, has_tables = connection.execute(IS_FIT).fetchone() or (False, False)
    if is_replica:
        raise NotMigrated(
            f"Database {alias!r} is a replica: it takes no writes. Have a database router keep the outbox away from it "
            "(allow_migrate), or correct its HOST."
        )
    if not has_tables:
        raise NotMigrated(
            f"Database {alias!r} has no tables of the outbox. Run manage.py migrate --database {alias}, "
            "or keep the outbox away from it by a database router."
        )


def connect(
    alias: str,
    *,
    application_name: str = "outbox",
    patience: timedelta | None = None,
    settings: Mapping[str, str] | None = None,
    **options: Any,
) -> OwnConnection:
    """
    Open a connection to one of Django's databases: autocommit, READ COMMITTED, tuples as rows.

    Statements that come again are prepared as `OPTIONS["prepare_threshold"]` of the database says; where it says nothing, as
    psycopg does by itself, and never behind a pooler.

    Args:
        patience: wait no longer for a lock, and let nobody wait longer for a transaction of this connection that is idle
            because its process is frozen. None: as the server is set.
        settings: PostgreSQL's, for the statements of this connection. Nothing of them stays behind on the backend of a pooler.
        options: libpq's, such as `connect_timeout`; they win over the database's own OPTIONS.

    Raises:
        ConfigurationError: the database is not PostgreSQL.
        psycopg.OperationalError: it cannot be reached.
    """
    wrapper = connections[alias]
    if wrapper.vendor != "postgresql" or not is_psycopg3:
        raise ConfigurationError(
            f"Database {alias!r} is {wrapper.vendor}; the outbox needs PostgreSQL 14 or later with psycopg 3. "
            'Set its ENGINE to "django.db.backends.postgresql".'
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
    limits = {} if patience is None else dict.fromkeys(WAITS, str(max(1, patience // timedelta(milliseconds=1))))
    with _closed_by_an_error(connection):
        connection.set_up({**NO_JIT, **READ_COMMITTED, **limits, **(settings or {})}, prepares_pooled=is_threshold_given)
    return connection


def connect_session(alias: str, **options: Any) -> OwnConnection:
    """
    Open a connection whose session is its own, so that session locks and LISTEN hold, by `OUTBOX["DIRECT_DATABASES"]`.

    Args:
        options: as `connect` takes them.

    Raises:
        ConfigurationError: a pooler in transaction mode stands before the database; or it is not PostgreSQL.
        psycopg.OperationalError: it cannot be reached.
    """
    direct = direct_alias(alias)
    connection = connect(direct, **options)
    if connection.is_pooled:
        with _closed_by_an_error(connection):
            with connect(direct) as other:
                is_own = connection.keeps_session(other)
            if not is_own:
                raise ConfigurationError(f"{explain_pooler(alias)} {name_direct(alias)}")
            connection.keep_session()
    return connection


@contextmanager
def _closed_by_an_error(connection: OwnConnection) -> Iterator[None]:
    """Leave no connection open that nobody gets."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


def direct_alias(alias: str) -> str:
    """Return the alias by which a database is reached around its pooler; its own where it has none."""
    return _direct_databases().get(alias, alias)


def _direct_databases() -> Mapping[str, str]:
    try:
        return conf.settings().direct_databases
    except ConfigurationError:  # E001 says what is wrong
        return {}


def is_behind_transaction_pooler(alias: str) -> bool:
    """
    Return whether a pooler in transaction mode stands before a database, where it shows.

    It does when a connection that has ended its transaction leaves its backend to the next one. Between two connections
    of their own that never happens.

    Raises:
        psycopg.Error: the database cannot be asked.
    """
    with connect(alias) as first, connect(alias) as second:
        return not first.keeps_session(second)


def explain_pooler(alias: str) -> str:
    """Return the sentence that says why a pooler in transaction mode will not do."""
    direct = direct_alias(alias)
    by = "" if direct == alias else f" by the alias {direct!r}, too,"
    return (
        f"Database {alias!r} is reached{by} through a pooler in transaction mode, where the session locks and LISTEN of relays, "
        "recorders, audits, archives and prunes hold nothing."
    )


def name_direct(alias: str) -> str:
    """Return the sentence that says what to write."""
    direct = direct_alias(alias)
    if direct != alias:
        return f"Have DATABASES[{direct!r}] lead to PostgreSQL itself."
    return (
        'Add an alias to DATABASES that leads to PostgreSQL itself, DATABASES["direct"] say, and name it: '
        f'OUTBOX["DIRECT_DATABASES"] = {{"{alias}": "direct"}}.'
    )


def raw(alias: str) -> Connection:
    """Return the psycopg connection under Django's own, connected; statements on it join the caller's transaction."""
    wrapper = connections[alias]
    wrapper.ensure_connection()
    return wrapper.connection  # type: ignore[no-any-return]


def bound_cursor(alias: str) -> CursorWrapper:
    """
    Open a cursor that can keep statements prepared, where `OPTIONS["prepare_threshold"]` of the database allows it.

    Django's own cursors write the values into the statement's text, so PostgreSQL parses and plans it each time.
    """
    wrapper = connections[alias]
    wrapper.ensure_connection()
    # Django wraps it as it does its own: debug log, errors of django.db, the check of the thread.
    wrapped: CursorWrapper = wrapper._prepare_cursor(psycopg.Cursor(wrapper.connection))  # type: ignore[attr-defined]
    return wrapped


def kept_cursor(alias: str, statement: str) -> CursorWrapper:
    """
    Return a cursor as `bound_cursor` does, kept for one statement as long as the connection lives. It is never closed.

    psycopg then finds out only once how the statement's values are written and its rows are read. The cursor holds the last
    values, so large ones are not for it.
    """
    wrapper = connections[alias]
    wrapper.ensure_connection()
    kept = wrapper.connection.__dict__.setdefault("outbox_cursors", {})
    if (cursor := kept.get(statement)) is None:
        cursor = kept[statement] = psycopg.Cursor(wrapper.connection)
    wrapped: CursorWrapper = wrapper._prepare_cursor(cursor)  # type: ignore[attr-defined]
    return wrapped


def drop_if_lost(alias: str) -> None:
    """Close Django's connection where it no longer answers; the next statement opens another."""
    wrapper = connections[alias]
    if wrapper.connection is not None and not wrapper.is_usable():
        wrapper.close()


def outside_transactions(view: Callable[P, R]) -> Callable[P, R]:
    """Keep a view out of the transactions that ATOMIC_REQUESTS opens: it waits in none and fails for want of none."""
    for alias in connections:
        view = transaction.non_atomic_requests(using=alias)(view)
    return view
