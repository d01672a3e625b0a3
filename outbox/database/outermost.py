"""
Transactions that are committed when they return, because something is answered or acknowledged behind them.

An exception that is not the database's (a task's time limit, a signal's) may be raised in the middle of Django's own COMMIT. The
connection then stays inside the transaction with autocommit off, and every later block, durable or not, commits nothing and
raises nothing. So the outermost block looks at the connection before it begins and behind its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import TransactionStatus

from outbox.errors import BrokenTransaction

IDLE = TransactionStatus.IDLE


class _ConnectionState(NamedTuple):
    """
    The state of a Django connection. The transaction around a test does not count.

    Args:
        autocommit: None where Django and psycopg differ over it.
        hooks: those of `on_commit()` that wait, although no transaction is open.
    """

    blocks: int
    autocommit: bool | None
    status: TransactionStatus
    hooks: int

    @classmethod
    def of(cls, wrapper: BaseDatabaseWrapper) -> Self:
        if wrapper.connection is None:
            return cls.clean(wrapper)
        blocks = len(wrapper.atomic_blocks) if wrapper.in_atomic_block else 0
        autocommit = wrapper.autocommit if wrapper.connection.autocommit == wrapper.autocommit else None
        status = TransactionStatus(wrapper.connection.pgconn.transaction_status)
        # Within a test's transaction both are sound: it begins with its first statement.
        status = IDLE if blocks and status is TransactionStatus.INTRANS else status
        return cls(blocks, autocommit, status, 0 if blocks else len(wrapper.run_on_commit))

    @classmethod
    def clean(cls, wrapper: BaseDatabaseWrapper) -> Self:
        """Return how it stands between two transactions."""
        return cls(0, wrapper.settings_dict["AUTOCOMMIT"], IDLE, 0)


@contextmanager
def atomic(using: str, *, durable: bool = False) -> Iterator[None]:
    """
    Open a transaction as Django's `atomic()` does: a savepoint where one is open, else `outermost_transaction`.

    Raises:
        BrokenTransaction: as there; or autocommit was off, outside of every block. The connection was closed.
        RuntimeError: a durable one is not the outermost.
    """
    wrapper = connections[using]
    if _is_in_transaction(wrapper) or wrapper.vendor != "postgresql" or not wrapper.settings_dict["AUTOCOMMIT"]:
        with transaction.atomic(using=using, durable=durable):
            yield
        return
    refuse_manual(using)
    with outermost_transaction(using):
        yield


@contextmanager
def outermost_transaction(alias: str) -> Iterator[None]:
    """
    Open the outermost transaction of a database, over Django's connection, which afterwards stands as it did before.

    A connection that was left broken is closed first. What its transaction did is undone.

    Raises:
        BrokenTransaction: the block is over, and it is not committed, or nobody can tell. The connection was closed.
        RuntimeError: a transaction is open already.
    """
    wrapper = connections[alias]
    before = _ConnectionState.of(wrapper)
    if not _is_in_transaction(wrapper) and before != _ConnectionState.clean(wrapper):
        _close(wrapper)
        before = _ConnectionState.of(wrapper)
    is_sound = False
    try:
        with transaction.atomic(using=alias, durable=True):
            yield
            require_alive(alias, "The transaction")
        is_sound = wrapper.connection is not None and _ConnectionState.of(wrapper) == before
    finally:
        if not is_sound and _ConnectionState.of(wrapper) != before:
            _close(wrapper)
    if not is_sound:
        _close(wrapper)
        raise BrokenTransaction("The transaction was left open at its end; what it did is undone, or comes again.")


def require_alive(using: str, subject: str, *, has_begun: bool = False) -> None:
    """
    Raise where COMMIT would silently be a rollback: PostgreSQL answers it so after an error that somebody caught.

    Args:
        has_begun: a statement was executed; without one there is no transaction to survive.

    Raises:
        BrokenTransaction: it would, and nobody has asked Django for a rollback.
    """
    wrapper = connections[using]
    status = wrapper.connection.info.transaction_status if wrapper.connection else TransactionStatus.UNKNOWN
    is_alive = status is TransactionStatus.INTRANS or (status is IDLE and not has_begun)
    if not is_alive and not wrapper.needs_rollback:
        raise BrokenTransaction(
            f"{subject} is broken: its work caught an error of the database that it did not survive. Put the statement that may "
            "fail into an atomic() of its own and catch the error outside that."
        )


def refuse_manual(using: str) -> None:
    """
    Raise where autocommit was turned off outside of every block, once: the connection is closed.

    An exception in the middle of Django's COMMIT leaves it so. So does who manages transactions by hand, and nobody can tell the
    two apart: to go on would commit nothing, or what the other one may want to roll back.

    Raises:
        BrokenTransaction: it was.
    """
    wrapper = connections[using]
    if wrapper.autocommit or wrapper.connection is None or not wrapper.settings_dict["AUTOCOMMIT"]:
        return
    if not _is_in_transaction(wrapper) and not wrapper.connection.autocommit:
        _close(wrapper)
        raise BrokenTransaction(
            f"Autocommit of database {using!r} was off, and no atomic() open: turned off by hand, or left so by an exception in "
            "the middle of a commit. The connection was closed, what it had not committed is undone. Try again, without "
            "set_autocommit()."
        )


def is_in_callers_transaction(using: str) -> bool:
    """Return whether a transaction is open, but for the one that Django puts around a test: it is not there in production."""
    wrapper = connections[using]
    return wrapper.in_atomic_block and any(not block._from_testcase for block in wrapper.atomic_blocks)  # type: ignore[attr-defined]


def close_broken(using: str) -> bool:
    """Close Django's connection where somebody has left it in a transaction that no block ends; return whether it was."""
    wrapper = connections[using]
    if (
        wrapper.vendor != "postgresql"
        or _is_in_transaction(wrapper)
        or _ConnectionState.of(wrapper) == _ConnectionState.clean(wrapper)
    ):
        return False
    _close(wrapper)
    return True


def close_all_broken() -> list[str]:
    """Do so with all databases whose transactions are not by hand; return the aliases of those that were left so."""
    used = connections.all(initialized_only=True)
    return [one.alias for one in used if one.settings_dict["AUTOCOMMIT"] and close_broken(one.alias)]


def _is_in_transaction(wrapper: BaseDatabaseWrapper) -> bool:
    return wrapper.in_atomic_block and bool(wrapper.atomic_blocks)


def _close(wrapper: BaseDatabaseWrapper) -> None:
    """Close a connection in whatever state; the next statement opens another, outside of all transactions."""
    try:
        wrapper.close()
    finally:
        wrapper.connection = None
        wrapper.in_atomic_block = wrapper.closed_in_transaction = wrapper.needs_rollback = False
        for left in (wrapper.atomic_blocks, wrapper.savepoint_ids, wrapper.run_on_commit):
            left.clear()
