"""
The outermost transaction of a piece of work, behind which something is acknowledged: committed, or an error is raised.

An exception that is not the database's (a task's time limit, a signal's) may be raised in the middle of Django's own COMMIT. The
connection then stays inside the transaction with autocommit off, and every later block, durable or not, commits nothing and
raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import TransactionStatus

from outbox.errors import BrokenTransaction

IDLE = TransactionStatus.IDLE


@dataclass(frozen=True, slots=True)
class _Standing:
    """How a connection of Django's stands. A test's own transactions may be open."""

    blocks: int
    autocommit: bool
    status: TransactionStatus

    @classmethod
    def of(cls, wrapper: BaseDatabaseWrapper) -> Self:
        if wrapper.connection is None:
            return cls(0, wrapper.settings_dict["AUTOCOMMIT"], TransactionStatus.IDLE)
        blocks = len(wrapper.atomic_blocks) if wrapper.in_atomic_block else 0
        status = wrapper.connection.info.transaction_status
        # Within a test's transaction both are sound: it begins with its first statement.
        return cls(blocks, wrapper.autocommit, IDLE if blocks and status is TransactionStatus.INTRANS else status)


@contextmanager
def outermost_transaction(alias: str) -> Iterator[None]:
    """
    Open the outermost transaction of a database, over Django's connection, which afterwards stands as it did before.

    Raises:
        BrokenTransaction: the block is over, and nobody can tell whether it is committed. The connection was closed.
        RuntimeError: a transaction is open already.
    """
    wrapper = connections[alias]
    if not wrapper.in_atomic_block and _Standing.of(wrapper) != _Standing(0, wrapper.settings_dict["AUTOCOMMIT"], IDLE):
        _close(wrapper)  # as somebody else has left it
    before = _Standing.of(wrapper)
    is_sound = False
    try:
        with transaction.atomic(using=alias, durable=True):
            yield
        is_sound = wrapper.connection is not None and _Standing.of(wrapper) == before
    finally:
        if not is_sound and _Standing.of(wrapper) != before:
            _close(wrapper)
    if not is_sound:
        _close(wrapper)
        raise BrokenTransaction("The transaction was left open at its end; what it did is undone, or comes again.")


def _close(wrapper: BaseDatabaseWrapper) -> None:
    """Close a connection in whatever state; the next statement opens another, outside of all transactions."""
    wrapper.close()
    wrapper.connection = None
    wrapper.in_atomic_block = wrapper.closed_in_transaction = wrapper.needs_rollback = False
    for left in (wrapper.atomic_blocks, wrapper.savepoint_ids, wrapper.run_on_commit):
        left.clear()
