"""Check that databases can be reached, are migrated, durable, have grants, partitions ahead, and the same time as this host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
from django.db import connections, router
from django.db.migrations.executor import MigrationExecutor

from outbox import database
from outbox.database import Connection, partitions
from outbox.errors import ConfigurationError, NotMigrated
from outbox.logs import line_of
from outbox.monitoring.doctor import grants
from outbox.monitoring.doctor.finding import Finding, Level

CONNECT_SECONDS = 5
CLOCK_DIFFERENCE = timedelta(seconds=5)  # message ids contain the time of this host, leases that of the database

VERSION_AND_TIME = "SELECT current_setting('server_version'), clock_timestamp()"

# Settings without which a committed transaction may be lost. synchronous_commit may have any value but off.
UNSAFE_SETTINGS = """
SELECT name, setting FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit') AND setting = 'off' ORDER BY name
"""


def check() -> Iterator[Finding]:
    """Check each database that may hold messages."""
    for alias in database.outbox_databases():
        subject = f"database {alias!r}"
        try:
            with database.connect(alias, application_name="outbox doctor", connect_timeout=CONNECT_SECONDS) as connection:
                database.ensure_fit(alias, connection)
                found = list(_check(subject, alias, connection))
        except NotMigrated as error:
            text = error.message.removeprefix(f"Database {alias!r} ").rstrip(".")
            yield Finding(Level.ERROR, subject, text, error.hint)
        except (ConfigurationError, psycopg.Error) as error:
            text = f"cannot be reached: {line_of(error)}"
            yield Finding(Level.ERROR, subject, text, "Start it, or correct DATABASES.")
        else:
            yield from found


def _check(subject: str, alias: str, connection: Connection) -> Iterator[Finding]:
    began, now = time.monotonic(), datetime.now(UTC)
    version, database_time = connection.execute(VERSION_AND_TIME).fetchone() or ("", now)
    took = time.monotonic() - began
    difference = abs(database_time - now - timedelta(seconds=took / 2))
    yield Finding(Level.OK, subject, f"PostgreSQL {version}, answers in {took * 1000:.0f} ms")
    if difference > CLOCK_DIFFERENCE:
        text = f"its clock and this host's are {difference.total_seconds():.0f} s apart"
        yield Finding(Level.WARNING, subject, text, "Synchronize both with a time server (NTP).")
    for label, missing in _missing_migrations(alias).items():
        text = f"migrations are missing: {', '.join(missing)}"
        yield Finding(Level.ERROR, subject, text, f"Run manage.py migrate {label} --database {alias}.")
    for name, setting in connection.execute(UNSAFE_SETTINGS).fetchall():
        text = f"{name} is {setting}: a crash may lose committed messages together with your rows"
        yield Finding(Level.WARNING, subject, text, f"Set {name} = on, unless this server is for tests.")
    yield from grants.check(subject, connection)
    if partitions.lacks_tomorrow(partitions.days(connection)):
        found = partitions.rights(connection)
        hint = "Check that outbox_relay runs, or beat's entry outbox-maintenance."
        if not found.may_create:
            hint = f"Run manage.py outbox_maintenance as {found.owner!r}, from cron or at each deployment; this role may not."
        yield Finding(Level.WARNING, subject, "the partition for tomorrow does not exist: maintenance does not run", hint)


def _missing_migrations(alias: str) -> dict[str, list[str]]:
    """Return the unapplied migrations of the outbox's apps that routers allow in the database: app label -> names."""
    executor = MigrationExecutor(connections[alias])
    labels = {config.label for config in database.outbox_apps()}
    wanted = [node for node in executor.loader.graph.leaf_nodes() if node[0] in labels and router.allow_migrate(alias, node[0])]
    found: dict[str, list[str]] = {}
    for migration, _ in executor.migration_plan(wanted):
        found.setdefault(migration.app_label, []).append(migration.name)
    return found
