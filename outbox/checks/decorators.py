"""Decorators that register functions that yield problems as Django's system checks, with the tag of the outbox."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import update_wrapper
from typing import Any

import psycopg
from django.core.checks import CheckMessage, Tags, register
from django.db import Error as DatabaseError

from outbox import database
from outbox.database import Connection

TAG = "outbox"  # manage.py check --tag outbox

LIMITS = {"lock_timeout": "2s", "statement_timeout": "5s"}

Check = Callable[..., list[CheckMessage]]


def check(*tags: str, deploy: bool = False) -> Callable[[Callable[[], Iterable[CheckMessage]]], Check]:
    """Register a check that needs no database."""

    def decorate(find: Callable[[], Iterable[CheckMessage]]) -> Check:
        def run(**kwargs: Any) -> list[CheckMessage]:
            return list(find())

        return _register(run, find, *tags, deploy=deploy)

    return decorate


def check_each_database(find: Callable[[str, Connection], Iterable[CheckMessage]]) -> Check:
    """
    Register a check that is called with each database of the outbox among those that `manage.py check --database` names.

    A database that cannot be reached is skipped.
    """

    def run(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
        problems: list[CheckMessage] = []
        for alias in sorted(set(databases or ()) & set(database.outbox_databases())):
            with suppress(DatabaseError, psycopg.Error), database.connect(alias, settings=LIMITS) as connection:
                problems.extend(find(alias, connection))
        return problems

    return _register(run, find, Tags.database)


def _register(run: Check, find: Callable[..., Iterable[CheckMessage]], *tags: str, deploy: bool = False) -> Check:
    update_wrapper(run, find)
    del run.__wrapped__  # type: ignore[attr-defined]  # Django requires **kwargs in the signature, which `find` lacks
    return register(TAG, *tags, deploy=deploy)(run)
