"""
A connection with settings of its own, even behind a pooler in transaction mode.

Behind such a pooler, a connection has a backend for one transaction only; then another client uses it. So settings are made for
each transaction, and no statement is prepared, so that nothing stays on the backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

Row = TypeVar("Row", covariant=True)

SET_LOCAL = "SELECT set_config(name, setting, true) FROM unnest(%s::text[], %s::text[]) AS s (name, setting)"

# Sets nothing if the backend's pid differs from that of the login: a pooler has no backend yet at login, and invents a pid.
SET_IF_DIRECT = """
SELECT count(set_config(name, setting, false)) FROM unnest(%s::text[], %s::text[]) AS s (name, setting)
WHERE pg_backend_pid() = %s
"""

SET = "SELECT set_config(name, setting, false) FROM unnest(%s::text[], %s::text[]) AS s (name, setting)"

BACKEND = "SELECT pg_backend_pid()"

SAMPLES = 4


class OwnConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection in autocommit. `is_pooled`: whether a pooler may share its session among clients."""

    is_pooled = False
    _names: list[str] = []
    _settings: list[str] = []
    _prepare_threshold: int | None = None  # for a session of its own

    def set_up(self, settings: Mapping[str, str], *, prepares_pooled: bool) -> None:
        """
        Make settings that hold for all statements.

        Args:
            settings: at least one, with values for `set_config()`.
            prepares_pooled: whether to prepare statements behind a pooler, too.
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
        Return whether this connection keeps its backend between transactions.

        Args:
            other: a second connection, opened in the same way, which takes backends that become free.
        """
        mine: set[tuple[Any, ...] | None] = set()
        for count in range(1, SAMPLES + 1):  # of varying length, since a pooler may hand out its backends in turn
            mine.add(self.execute(BACKEND).fetchone())
            others = {other.execute(BACKEND).fetchone() for _ in range(count)}
            if len(mine) > 1 or mine & others:
                return False
        return True

    def keep_session(self) -> None:
        """Use the session as this connection's own, as a pooler in session mode allows."""
        if self.is_pooled:
            self.is_pooled = False
            self.cursor_factory = psycopg.Cursor
            self.prepare_threshold = self._prepare_threshold
            self.execute(SET, [self._names, self._settings])

    @contextmanager
    def transaction(self, savepoint_name: str | None = None, force_rollback: bool = False) -> Iterator[psycopg.Transaction]:
        """Open a transaction, or a savepoint within one, with the settings of this connection."""
        is_outermost = self.info.transaction_status is TransactionStatus.IDLE
        with super().transaction(savepoint_name, force_rollback) as opened:
            if self.is_pooled and is_outermost:
                self.execute(SET_LOCAL, [self._names, self._settings])
            yield opened


class _PooledCursor(psycopg.Cursor[Row]):
    """A cursor that opens a transaction for each statement outside of one, because settings hold for one transaction."""

    def execute(self, *args: Any, **options: Any) -> Self:
        if self.connection.info.transaction_status is not TransactionStatus.IDLE:
            return super().execute(*args, **options)
        with self.connection.transaction():
            return super().execute(*args, **options)
