"""Choose the database of a message, which is that of the business rows, and guard its transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from uuid import UUID

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model
from django.db.transaction import atomic as atomic_block
from psycopg.pq import TransactionStatus

from outbox.database import guarded
from outbox.errors import InvalidMessage, NotInTransaction, WrongDatabase
from outbox.half_first import open_transaction
from outbox.logs import get_logger, log_fields
from outbox.message import Message
from outbox.models import MessageRow
from outbox.publishing.draft import Draft, compose
from outbox.publishing.statements import write
from outbox.publishing.wakeup import wake_after_commit
from outbox.unawaited import awaiting_all

logger = get_logger(__name__)


@contextmanager
def atomic(
    using: str | None = None, *, durable: bool = False, half_first: Message | None = None, about: Model | None = None
) -> Iterator[str]:
    """
    Open a transaction, or a savepoint in the one that is open; messages published in it go to its database.

    It is Django's `atomic`, which also works, and adds two things: messages go to its database by default, and the outermost
    block raises where a commit would silently be a rollback.

    Args:
        using: the database's alias. By default that of the innermost `atomic()` or of the handler that runs, else where the
            routers write messages. It is also what `as` gives.
        durable: raise unless this is the outermost block, as Django's `atomic(durable=True)` does.
        half_first: a message that goes to its broker as a half message before the block begins, and is committed when the
            transaction is; published here, not by `publish()`. The block is the outermost one then. While the topic is paused
            it is stored for a relay to send, as every other.
        about: the row that the message is about; it may be unsaved if its primary key is known.

    Raises:
        BrokenTransaction: the block is the outermost one, and is not committed, or nobody can tell: it caught an error that the
            transaction did not survive, or the connection was left in the middle of one, which was closed.
        NotAwaited: a call of `apublish()` in the block was not awaited.
        HalfNotStored, NotOutermost: as `outbox.half_first.open_transaction` says.
    """
    home = None if half_first is None or about is None else _home_of(type(half_first).__name__, about, using)
    alias = using or home or guarded.innermost() or router.db_for_write(MessageRow)
    with guarded.as_innermost(alias), _open(alias, durable, half_first, about), awaiting_all():
        yield alias


def _open(alias: str, durable: bool, message: Message | None, about: Model | None) -> AbstractContextManager[None]:
    if message is None:
        return guarded.atomic(alias, durable=durable)
    draft, row = compose(message), None if about is None else describe(about, alias)
    return open_transaction(draft, alias, publish=partial(_publish, draft, alias, row), about=row)


def _publish(draft: Draft, alias: str, about: str | None) -> None:
    """Write a message for a relay to send: one that was to go half first, to a topic that is paused."""
    write(draft, alias, about=about, idempotency_key=None)
    wake_after_commit(alias, draft.broker)


def choose_database(subject: str, *, using: str | None, about: Model | None) -> str:
    """
    Return the database a message goes to: `using`, else that of `about`, else that of the innermost
    `outbox.atomic()` or handler, else where the routers write messages.

    Raises:
        WrongDatabase: the row it is about lives elsewhere.
        NotInTransaction: no transaction is open there.
    """
    home = None if about is None else _home_of(subject, about, using)
    alias = using or home or guarded.innermost() or router.db_for_write(MessageRow)
    if not guarded.is_in_callers_transaction(alias):
        raise _not_in_transaction(subject, alias)
    if not (using or home) and len(connections.settings) > 1:
        _warn_of_rows_elsewhere(subject, alias)
    return alias


def describe(row: Model, using: str) -> str:
    """
    Write a row as the column `about` holds it: `shop.order:4711`, as its table has the key; a proxy by its table's model.

    Args:
        using: the row's database.
    """
    return describe_key(row._meta.model, row.pk, using)


def describe_key(model: type[Model], key: object, using: str) -> str:
    """
    Write the row with a primary key as `describe()` does. The key may be text, as a person types it.

    Raises:
        ValidationError, ValueError, ArithmeticError, DatabaseError: the model's primary key cannot have this value.
    """
    return f"{(model._meta.concrete_model or model)._meta.label_lower}:{_stored_key(model, key, using)}"


def _stored_key(model: type[Model], key: object, using: str) -> object:
    """Return a primary key as PostgreSQL writes it, which is asked unless Python writes such a key in the same way."""
    field = model._meta.pk
    if isinstance(key, tuple) or field is None:
        return key
    while (remote := getattr(field, "target_field", None)) is not None:  # the key is that of a parent, or of another row
        field = remote
    connection = connections[using]
    value, kind = field.get_db_prep_value(field.to_python(key), connection), field.cast_db_type(connection) or ""
    if isinstance(value, str) and kind.startswith(("varchar", "text")):
        return str.__str__(value)
    if (type(value), kind) == (UUID, "uuid") or (type(value) is int and kind in ("smallint", "integer", "bigint")):
        return value
    with atomic_block(using), connection.cursor() as cursor:  # PostgreSQL may refuse what a person typed
        cursor.execute(f"SELECT {key_text(f'CAST(%s AS {kind})', kind)}", [value])
        return cursor.fetchone()[0]


def key_text(key: str, kind: str) -> str:
    """Return the SQL that writes a key of a type as text, whatever the session's time zone."""
    return f"({key} AT TIME ZONE 'UTC')::text || '+00'" if kind.startswith("timestamp with") else f"{key}::text"


def _home_of(subject: str, about: Model, using: str | None) -> str | None:
    """Return the database of a row, None for one that has not been saved. Raises WrongDatabase where it is not `using`."""
    if not isinstance(about, Model):
        raise InvalidMessage(f"{subject} is about {about!r}, which is not a model instance.", hint="Pass the row itself.")
    if about.pk is None or (isinstance(about.pk, tuple) and None in about.pk) or hasattr(about.pk, "resolve_expression"):
        raise InvalidMessage(
            f"{subject} is about a row of {about._meta.label} that has no primary key.",
            hint="Publish after it is saved, and before it is deleted; after bulk_create(), read keys that the database made.",
        )
    home = about._state.db and router.db_for_write(about._meta.model, instance=about)  # it may have been read from a replica
    if using and home and using not in (home, about._state.db):
        raise WrongDatabase(
            f"{subject} would go to database {using!r}, but {describe(about, home)} lives in {home!r}; "
            "no transaction spans both.",
            hint="Leave using= out, or publish about a row of that database.",
        )
    return home


def _warn_of_rows_elsewhere(subject: str, alias: str) -> None:
    """Log it if only transactions of other databases have run statements: the message's rows are probably there."""
    if _has_begun(connections[alias]):
        return
    others = [other for other in connections.all(initialized_only=True) if other.alias != alias and other.vendor == "postgresql"]
    begun = [other.alias for other in others if guarded.is_in_callers_transaction(other.alias) and _has_begun(other)]
    if begun:
        logger.warning(
            "%s is published to database %r, whose transaction has run no statement yet, and transactions of %s have. If its "
            "rows are there, pass about= or using=: no transaction spans both.",
            *(subject, alias, ", ".join(map(repr, sorted(begun)))),
            extra=log_fields(database=alias),
        )


def _has_begun(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a statement was run in the open transaction: psycopg begins it with the first one."""
    own = connection.connection
    return own is not None and own.info.transaction_status != TransactionStatus.IDLE


def _not_in_transaction(subject: str, alias: str) -> NotInTransaction:
    """Return the error that says why nothing was published, and the way out."""
    text = f"{subject} was published outside a transaction of database {alias!r}, so nothing would tie it to the rows."
    if connections[alias].in_atomic_block:
        text += " The transaction around this test does not count: in production it is not there."
    if is_in_event_loop():
        hint = (
            "In async code, decorate the coroutine function with @transactional and `await apublish(...)`: "
            "Django's transactions belong to a thread, not to the event loop."
        )
        return NotInTransaction(text, hint)
    initialized = [other.alias for other in connections.all(initialized_only=True)]
    if elsewhere := [other for other in initialized if guarded.is_in_callers_transaction(other)]:
        text += f" Open are transactions of: {', '.join(sorted(elsewhere))}."
        hint = (
            "If the rows are there, pass using= or about=; "
            f"else open one by @transactional(using={alias!r}) or `with outbox.atomic({alias!r}):`."
        )
        return NotInTransaction(text, hint)
    hint = (
        "Decorate the view or function with @transactional, or use `with outbox.atomic():`, around publish() and the statements "
        "that write the rows. In on_commit() and in another thread, their transaction is over or another one; a handler of "
        "post_save has that of its caller only."
    )
    return NotInTransaction(text, hint)


def is_in_event_loop() -> bool:
    """Return whether a coroutine runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
