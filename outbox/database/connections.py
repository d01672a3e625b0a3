"""Which databases are ours, and connections of our own beside Django's: autocommit, plain psycopg."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import psycopg
from django.apps import AppConfig, apps
from django.db import connections, router, transaction
from django.db.backends.postgresql.psycopg_any import is_psycopg3

from outbox.errors import ConfigurationError

P = ParamSpec("P")
R = TypeVar("R")

Connection = psycopg.Connection[tuple[Any, ...]]

# Our statements take milliseconds. What the planner thinks they could cost with a backlog has them compiled each time,
# which takes up to seconds.
NO_JIT = "SET jit = off"

# A host that vanished is noticed in seconds, not in hours: within 5 s of its return there is a new connection.
OUTAGE_OPTIONS = {
    "connect_timeout": 5,  # seconds, as the next two
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}

BACKEND = "SELECT pg_backend_pid()"


def outbox_apps() -> list[AppConfig]:
    """Return the installed apps of the outbox: its own, and those beside it."""
    return [config for config in apps.get_app_configs() if f"{config.name}.".startswith("outbox.")]


def outbox_databases() -> list[str]:
    """List the databases that may hold messages. None is asked: whether it has the tables shows when somebody comes there."""
    return [alias for alias in connections if is_outbox_database(alias)]


def is_outbox_database(alias: str) -> bool:
    """Say whether a database may hold messages, by settings and routers."""
    message_row = apps.get_model("outbox", "MessageRow")  # this room is below models
    return connections[alias].vendor == "postgresql" and router.allow_migrate_model(alias, message_row)


def connect(alias: str, *, application_name: str = "outbox", **options: Any) -> Connection:
    """
    Open a connection to one of Django's databases: autocommit, READ COMMITTED, tuples as rows.

    Args:
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
    for name in ("cursor_factory", "context", "server_side_binding", "prepare_threshold"):
        params.pop(name, None)
    params = OUTAGE_OPTIONS | params | {"application_name": application_name, **options}
    connection: Connection = psycopg.connect(**params, autocommit=True)
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    connection.execute(NO_JIT)
    return connection


def raw(alias: str) -> Connection:
    """Give the psycopg connection under Django's own, connected; statements on it join the caller's transaction."""
    wrapper = connections[alias]
    wrapper.ensure_connection()
    return wrapper.connection  # type: ignore[no-any-return]


def is_behind_transaction_pooler(alias: str) -> bool:
    """
    Say whether a pooler in transaction mode stands before a database, where it shows.

    It does when a connection that has ended its transaction leaves its backend to the next one. Between two connections
    of their own that never happens.

    Raises:
        psycopg.Error: the database cannot be asked.
    """
    with connect(alias) as first, connect(alias) as second:
        before = first.execute(BACKEND).fetchone()
        with second.transaction():
            return second.execute(BACKEND).fetchone() == before


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
