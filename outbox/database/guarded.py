"""
Guarded transactions: if the block returns, the transaction is certainly committed, so an answer or acknowledgement can follow.

An exception that does not come from the database (a task's time limit, a signal handler) may be raised in the middle of Django's
own COMMIT. The connection then stays in the transaction with autocommit off, and every later block, durable or not, silently
commits nothing. So a guarded transaction checks the connection before the transaction begins and after it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.pq import TransactionStatus

from outbox.errors import BrokenTransaction

IDLE = TransactionStatus.IDLE


_innermost: ContextVar[str | None] = ContextVar("outbox_innermost_transaction", default=None)


def innermost() -> str | None:
    """Return the database of the innermost block of `as_innermost`; None outside of all such blocks."""
    return _innermost.get()


@contextmanager
def as_innermost(alias: str) -> Iterator[None]:
    """Make a database the default one for messages that are published in the block."""
    token = _innermost.set(alias)
    try:
        yield
    finally:
        _innermost.reset(token)


# The state of a Django connection: the number of open `atomic()` blocks; autocommit, or None if Django's and psycopg's differ;
# the transaction's status; and the number of `on_commit()` hooks that are registered although no transaction is open.
_ConnectionState = tuple[int, bool | None, TransactionStatus, int]


def _state_of(wrapper: BaseDatabaseWrapper) -> _ConnectionState:
    if wrapper.connection is None:
        return _clean_state(wrapper)
    blocks = len(wrapper.atomic_blocks) if wrapper.in_atomic_block else 0
    autocommit = wrapper.autocommit if wrapper.connection.autocommit == wrapper.autocommit else None
    status = TransactionStatus(wrapper.connection.pgconn.transaction_status)
    # psycopg begins a transaction with its first statement, so within blocks IDLE and INTRANS are both correct.
    status = IDLE if blocks and status is TransactionStatus.INTRANS else status
    return blocks, autocommit, status, 0 if blocks else len(wrapper.run_on_commit)


def _clean_state(wrapper: BaseDatabaseWrapper) -> _ConnectionState:
    """Return the state that a correct connection has between two transactions."""
    return 0, wrapper.settings_dict["AUTOCOMMIT"], IDLE, 0


@contextmanager
def atomic(using: str, *, durable: bool = False) -> Iterator[None]:
    """
    Open a block like Django's `atomic()`: a savepoint within a transaction, otherwise a guarded transaction.

    Raises:
        BrokenTransaction: for the same reasons as in `guarded_transaction`; or the savepoint would be rolled back because an
            error was caught inside it; or autocommit was off outside of every block, and the connection was closed.
        RuntimeError: a durable block is not the outermost one.
    """
    wrapper = connections[using]
    if _is_in_transaction(wrapper) or wrapper.vendor != "postgresql" or not wrapper.settings_dict["AUTOCOMMIT"]:
        with _record_set_rollback(wrapper), transaction.atomic(using=using, durable=durable):
            yield
            _refuse_marked(wrapper, "The transaction")
        return
    refuse_manual(using)
    with guarded_transaction(using):
        yield


@contextmanager
def guarded_transaction(alias: str) -> Iterator[None]:
    """
    Open a transaction, never a savepoint, on Django's connection; the block returns only if all of it was committed.

    Afterwards the connection has the same state as before. If earlier code left the connection in a broken state, it is closed
    first, which rolls that code's transaction back.

    Raises:
        BrokenTransaction: at the end of the block, the transaction is not committed, or it is unknown whether it is. The
            connection was closed.
        RuntimeError: a transaction is open already.
    """
    wrapper = connections[alias]
    before = _state_of(wrapper)
    if not _is_in_transaction(wrapper) and before != _clean_state(wrapper):
        _close(wrapper)
        before = _state_of(wrapper)
    is_sound = False
    try:
        with _record_set_rollback(wrapper), transaction.atomic(using=alias, durable=True):
            yield
            require_alive(alias, "The transaction")
        is_sound = wrapper.connection is not None and _state_of(wrapper) == before
    finally:
        if not is_sound and _state_of(wrapper) != before:
            _close(wrapper)
    if not is_sound:
        _close(wrapper)
        raise BrokenTransaction("The transaction was left open at its end; its work is rolled back, or will be repeated.")


def require_alive(using: str, subject: str, *, has_begun: bool = False) -> None:
    """
    Raise an error if COMMIT would silently be a rollback, because the caller has caught an error inside the transaction.

    After a database error PostgreSQL commits nothing. Django rolls back, too, if an error passed through a method of a model or a
    manager, or through a block without a savepoint: it marks the transaction (`needs_rollback`), as
    `transaction.set_rollback(True)` does.

    Args:
        has_begun: whether a statement was executed; without one, PostgreSQL has begun no transaction.

    Raises:
        BrokenTransaction: the transaction would be rolled back at its end, and the caller has not requested that.
    """
    wrapper = connections[using]
    _refuse_marked(wrapper, subject)
    status = wrapper.connection.info.transaction_status if wrapper.connection else TransactionStatus.UNKNOWN
    is_alive = status is TransactionStatus.INTRANS or (status is IDLE and not has_begun)
    if not is_alive and not wrapper.needs_rollback:
        raise _broken(subject)


def _broken(subject: str) -> BrokenTransaction:
    return BrokenTransaction(
        f"{subject} is broken: an error was caught inside it, after which nothing is committed.",
        hint="Put the statement that may fail into an atomic() block of its own, and catch the error outside that block.",
    )


# An attribute of Django's connection: whether the caller has requested the rollback by `transaction.set_rollback(True)`.
_REQUESTED = "_outbox_rollback_is_requested"


def _refuse_marked(wrapper: BaseDatabaseWrapper, subject: str) -> None:
    """Raise BrokenTransaction if Django has marked the transaction for rollback, and the caller has not requested that."""
    if wrapper.needs_rollback and not vars(wrapper).get(_REQUESTED):
        raise _broken(subject) from vars(wrapper).get("rollback_exc")


@contextmanager
def _record_set_rollback(wrapper: BaseDatabaseWrapper) -> Iterator[None]:
    """Record calls of `transaction.set_rollback()` in the block, to tell them from the marks that Django sets after an error."""
    attributes = vars(wrapper)
    set_rollback = wrapper.set_rollback
    before = {name: attributes.pop(name, None) for name in ("set_rollback", _REQUESTED)}

    def record_and_set(rollback: bool) -> None:
        attributes[_REQUESTED] = rollback
        set_rollback(rollback)

    attributes |= {"set_rollback": record_and_set, "rollback_exc": None}  # `rollback_exc` may be of an earlier transaction
    try:
        yield
    finally:
        for name, value in before.items():
            attributes.pop(name, None)
            if value is not None:
                attributes[name] = value


def refuse_manual(using: str) -> None:
    """
    Raise an error if autocommit is off outside of every block, and close the connection.

    An exception in the middle of Django's COMMIT leaves autocommit off, and so does code that manages transactions itself. The
    two cases cannot be told apart. To continue would commit nothing in the first case, and in the second case possibly work that
    the other code wants to roll back.

    Raises:
        BrokenTransaction: autocommit is off.
    """
    wrapper = connections[using]
    if wrapper.autocommit or wrapper.connection is None or not wrapper.settings_dict["AUTOCOMMIT"]:
        return
    if not _is_in_transaction(wrapper) and not wrapper.connection.autocommit:
        _close(wrapper)
        raise BrokenTransaction(
            f"Autocommit of database {using!r} was off outside of atomic(), because of set_autocommit(False) or of an exception "
            "in the middle of a commit. The connection was closed, and uncommitted work is rolled back. Try again without "
            "set_autocommit()."
        )


def is_in_callers_transaction(using: str) -> bool:
    """Return whether a transaction is open, apart from the one that Django's TestCase opens around a test."""
    wrapper = connections[using]
    return wrapper.in_atomic_block and any(not block._from_testcase for block in wrapper.atomic_blocks)  # type: ignore[attr-defined]


def close_broken(using: str) -> bool:
    """Close Django's connection if it is in a transaction although no block is open; return whether it was."""
    wrapper = connections[using]
    if wrapper.vendor != "postgresql" or _is_in_transaction(wrapper) or _state_of(wrapper) == _clean_state(wrapper):
        return False
    _close(wrapper)
    return True


def close_all_broken() -> list[str]:
    """Call `close_broken` for all databases in autocommit mode; return the aliases of the connections that were closed."""
    used = connections.all(initialized_only=True)
    return [connection.alias for connection in used if connection.settings_dict["AUTOCOMMIT"] and close_broken(connection.alias)]


def _is_in_transaction(wrapper: BaseDatabaseWrapper) -> bool:
    return wrapper.in_atomic_block and bool(wrapper.atomic_blocks)


def _close(wrapper: BaseDatabaseWrapper) -> None:
    """Close a connection in any state; the next statement opens another, outside of transactions."""
    try:
        wrapper.close()
    finally:
        wrapper.connection = None
        wrapper.in_atomic_block = wrapper.closed_in_transaction = wrapper.needs_rollback = False
        for leftovers in (wrapper.atomic_blocks, wrapper.savepoint_ids, wrapper.run_on_commit):
            leftovers.clear()
