"""Databases as their servers are: `manage.py check --database default`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution
from django.db import Error as DatabaseError
from django.db import NotSupportedError, connections

from outbox import database


def check_version(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """
    E024: The PostgreSQL server is too old.

    Django names the version it needs, which is never below the outbox's own, 13.
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
    W025: A pooler in transaction mode stands before the database.

    Publishing works. A relay holds its lane by a session lock, which such a pooler gives to everybody: let relays
    (`outbox_relay`, Celery's workers) connect to PostgreSQL directly, or through a pool in session mode. Where only web
    processes see this, silence it in their settings.
    """

    def look(alias: str) -> list[CheckMessage]:
        if not database.is_behind_transaction_pooler(alias):
            return []
        return [
            Caution(
                f"Database {alias!r} is reached through a pooler in transaction mode, where session locks hold nothing.",
                hint="Let relays connect to PostgreSQL directly, or through a pool in session mode.",
                id="outbox.W025",
            )
        ]

    return _look_at(databases, look)


def _look_at(aliases: Sequence[str] | None, look: Callable[[str], list[CheckMessage]]) -> list[CheckMessage]:
    """Look at the outbox's databases among those asked about. One that is away is not the checks' to tell."""
    found: list[CheckMessage] = []
    for alias in set(aliases or ()) & set(database.outbox_databases()):
        try:
            found.extend(look(alias))
        except (DatabaseError, psycopg.Error):
            continue
    return found
