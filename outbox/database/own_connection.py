"""
A connection of ours: with settings of its own, whether or not the server's session behind it is its own, too.

Behind a pooler in transaction mode a connection has a backend for the length of a transaction, then somebody else has it. What is
set there holds for one transaction, and no statement is prepared, so that nothing stays behind on the backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

Row = TypeVar("Row", covariant=True)

SET_LOCAL = "SELECT set_config(name, setting, true) FROM unnest(%s::text[], %s::text[]) AS s (name, setting)"

# Nothing is set where the backend is another than the login named: poolers make that number up, since they have none yet.
SET_IF_DIRECT = """
SELECT count(set_config(name, setting, false)) FROM unnest(%s::text[], %s::text[]) AS s (name, setting)
WHERE pg_backend_pid() = %s
"""

SET = "SELECT set_config(name, setting, false) FROM unnest(%s::text[], %s::text[]) AS s (name, setting)"

BACKEND = "SELECT pg_backend_pid()"

LOOKS = 4


class OwnConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection in autocommit. `is_pooled`: a pooler stands between, which may give the session to others, too."""

    is_pooled = False
    _names: list[str] = []
    _settings: list[str] = []
    _prepare_threshold: int | None = None  # where the session is this connection's own

    def set_up(self, settings: Mapping[str, str], *, prepares_pooled: bool) -> None:
        """
        Run all statements with these settings.

        Args:
            settings: at least one, as `set_config()` takes them.
            prepares_pooled: statements are prepared behind a pooler as well.
        """
        self._names, self._settings = list(settings), list(settings.values())
        self._prepare_threshold = self.prepare_threshold
        direct = self.execute(SET_IF_DIRECT, [self._names, self._settings, self.info.backend_pid]).fetchone()
        self.is_pooled = direct == (0,)
        if self.is_pooled:
            self.cursor_factory = _PooledCursor
            if not prepares_pooled:
                self.prepare_threshold = None

    def keeps_session(self, other: OwnConnection) -> bool:
        """
        Return whether the backend stays this connection's between two transactions.

        Args:
            other: a connection that was opened as this one was; it takes backends that are free in between.
        """
        mine: set[tuple[Any, ...] | None] = set()
        for look in range(1, LOOKS + 1):  # a pooler that gives its backends in turn: not always after the same number
            mine.add(self.execute(BACKEND).fetchone())
            others = {other.execute(BACKEND).fetchone() for _ in range(look)}
            if len(mine) > 1 or mine & others:
                return False
        return True

    def keep_session(self) -> None:
        """Use the session as this connection's own, though a pooler stands between: in session mode it is."""
        if self.is_pooled:
            self.is_pooled = False
            self.cursor_factory = psycopg.Cursor
            self.prepare_threshold = self._prepare_threshold
            self.execute(SET, [self._names, self._settings])

    @contextmanager
    def transaction(self, savepoint_name: str | None = None, force_rollback: bool = False) -> Iterator[psycopg.Transaction]:
        """Open a transaction, or a savepoint in the one that is open, as psycopg does; with the settings of this connection."""
        is_outermost = self.info.transaction_status is TransactionStatus.IDLE
        with super().transaction(savepoint_name, force_rollback) as opened:
            if self.is_pooled and is_outermost:
                self.execute(SET_LOCAL, [self._names, self._settings])
            yield opened


class _PooledCursor(psycopg.Cursor[Row]):
    """Runs a statement in a transaction of its own where none is open: its settings would hold for no other."""

    def execute(self, *args: Any, **options: Any) -> Self:
        if self.connection.info.transaction_status is not TransactionStatus.IDLE:
            return super().execute(*args, **options)
        with self.connection.transaction():
            return super().execute(*args, **options)
