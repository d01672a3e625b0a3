"""
A connection whose PostgreSQL settings apply to all its statements, even behind a pooler in transaction mode.

Behind such a pooler, a connection has a backend for one transaction only; then another client uses it. So the settings are set
anew in each transaction, and no statement is prepared, so that nothing stays on the backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

Row = TypeVar("Row", covariant=True)

SET_LOCAL = "SELECT set_config(name, setting, true) FROM unnest(%s::text[], %s::text[]) AS s (name, setting)"

# Set nothing if the backend's pid differs from the one that the login reported, which shows a pooler: at login it has no backend
# yet, and so invents a pid.
SET_IF_DIRECT = """
SELECT count(set_config(name, setting, false)) FROM unnest(%s::text[], %s::text[]) AS s (name, setting)
WHERE pg_backend_pid() = %s
"""

SET = "SELECT set_config(name, setting, false) FROM unnest(%s::text[], %s::text[]) AS s (name, setting)"

BACKEND = "SELECT pg_backend_pid()"

SAMPLES = 4  # how often `has_stable_backend` compares the backends


class OwnConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection in autocommit. `is_pooled`: whether a pooler may share its session among clients."""

    is_pooled = False
    _names: list[str] = []
    _settings: list[str] = []
    _prepare_threshold: int | None = None  # the value before `set_up`, which may set `prepare_threshold` to None

    def set_up(self, settings: Mapping[str, str], *, prepares_pooled: bool) -> None:
        """
        Apply settings to all statements of this connection.

        Args:
            settings: at least one; values are for `set_config()`.
            prepares_pooled: whether to prepare statements behind a pooler, too.
        """
        self._names, self._settings = list(settings), list(settings.values())
        self._prepare_threshold = self.prepare_threshold
        applied = self.execute(SET_IF_DIRECT, [self._names, self._settings, self.info.backend_pid]).fetchone()
        self.is_pooled = applied == (0,)
        if self.is_pooled:
            self.cursor_factory = _PooledCursor
            if not prepares_pooled:
                self.prepare_threshold = None

    def has_stable_backend(self, other: OwnConnection) -> bool:
        """
        Return whether this connection keeps its backend between transactions.

        Args:
            other: a second connection, opened in the same way. Behind a pooler in transaction mode, it gets backends that this
                connection has freed.
        """
        own_backends: set[tuple[Any, ...] | None] = set()
        # The number of statements on `other` grows with each sample. With a fixed number, a pooler that hands out its backends in
        # turn could give this connection the same one each time.
        for count in range(1, SAMPLES + 1):
            own_backends.add(self.execute(BACKEND).fetchone())
            others = {other.execute(BACKEND).fetchone() for _ in range(count)}
            if len(own_backends) > 1 or own_backends & others:
                return False
        return True

    def use_as_session(self) -> None:
        """Apply the settings once to the whole session, because the pooler is in session mode and does not share it."""
        if self.is_pooled:
            self.is_pooled = False
            self.cursor_factory = psycopg.Cursor
            self.prepare_threshold = self._prepare_threshold
            self.execute(SET, [self._names, self._settings])

    @contextmanager
    def transaction(self, savepoint_name: str | None = None, force_rollback: bool = False) -> Iterator[psycopg.Transaction]:
        """Open a transaction, or a savepoint within one; a transaction behind a pooler gets the settings of this connection."""
        is_outermost = self.info.transaction_status is TransactionStatus.IDLE
        with super().transaction(savepoint_name, force_rollback) as opened:
            if self.is_pooled and is_outermost:
                self.execute(SET_LOCAL, [self._names, self._settings])
            yield opened


class _PooledCursor(psycopg.Cursor[Row]):
    """A cursor that runs each statement in a transaction, because behind a pooler the settings apply to one transaction."""

    def execute(self, *args: Any, **options: Any) -> Self:
        if self.connection.info.transaction_status is not TransactionStatus.IDLE:
            return super().execute(*args, **options)
        with self.connection.transaction():
            return super().execute(*args, **options)
