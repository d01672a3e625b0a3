"""Choose the database of a message, which must be the database of the business rows, and guard its transaction."""

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
from outbox.publishing import rules
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
    Open a transaction, or a savepoint if one is open already; messages published in the block are stored in its database.

    Django's `atomic` also works. This one adds two things: its database becomes the default for messages published in the block,
    and the outermost block raises if a commit would silently be a rollback.

    Args:
        using: the database's alias. By default that of the innermost `atomic()` or of the running handler, otherwise the one that
            the routers choose for messages. The `as` clause of the `with` statement gets this alias.
        durable: raise unless this is the outermost block, as Django's `atomic(durable=True)` does.
        half_first: a message that is sent to its broker as a half message before the block begins, and committed there after the
            transaction is committed. It is published by this argument, so do not call `publish()` for it. The block must be the
            outermost one. While the topic is paused, the message is stored like any other, and a relay sends it later.
        about: the row that the half-first message is about; it may be unsaved if its primary key is known.

    Raises:
        BrokenTransaction: the block is the outermost one, and its transaction is not committed, or it is unknown whether it is:
            an error was caught inside the block after which nothing can be committed; or the connection was left inside the
            transaction, and was closed.
        NotAwaited: a call of `apublish()` in the block was not awaited.
        HalfNotStored, NotOutermost: see `outbox.half_first.open_transaction`.
    """
    row_database = None if half_first is None or about is None else _database_of(type(half_first).__name__, about, using)
    alias = using or row_database or guarded.innermost() or router.db_for_write(MessageRow)
    with guarded.as_innermost(alias), _open(alias, durable, half_first, about), awaiting_all():
        yield alias


def _open(alias: str, durable: bool, message: Message | None, about: Model | None) -> AbstractContextManager[None]:
    if message is None:
        return guarded.atomic(alias, durable=durable)
    draft = compose(message)
    row = about_text(draft.subject, about, alias)
    return open_transaction(draft, alias, publish=partial(_publish, draft, alias, row), about=row)


def _publish(draft: Draft, alias: str, about: str | None) -> None:
    """Store a message that was to be sent half first, but whose topic is paused, so that a relay sends it later."""
    write(draft, alias, about=about, idempotency_key=None)
    wake_after_commit(alias, draft.broker)


def choose_database(subject: str, *, using: str | None, about: Model | None) -> str:
    """
    Return the database in which a message is stored.

    It is `using`; without it, the database of `about`; without that, the one of the innermost `outbox.atomic()` or handler; and
    otherwise the one that the routers choose for messages.

    Raises:
        WrongDatabase: the row `about` is stored in another database than `using`.
        NotInTransaction: no transaction is open in the message's database.
    """
    row_database = None if about is None else _database_of(subject, about, using)
    alias = using or row_database or guarded.innermost() or router.db_for_write(MessageRow)
    if not guarded.is_in_callers_transaction(alias):
        raise _not_in_transaction(subject, alias)
    if not (using or row_database) and len(connections.settings) > 1:
        _warn_of_rows_elsewhere(subject, alias)
    return alias


def about_text(subject: str, about: Model | None, using: str) -> str | None:
    """
    Return what a message's column `about` has for a row; None without a row.

    Raises:
        InvalidMessage: the text is too long for the column's index.
    """
    text = None if about is None else describe(about, using)
    if text is not None:
        rules.check_about(subject, text)
    return text


def describe(row: Model, using: str) -> str:
    """
    Return the text that the column `about` has for a row, such as `shop.order:4711`.

    The primary key is written as PostgreSQL writes it; a proxy model is named by its concrete model.

    Args:
        using: the row's database.
    """
    return describe_key(row._meta.model, row.pk, using)


def describe_key(model: type[Model], key: object, using: str) -> str:
    """
    Return the text of `describe()` for a row with this primary key. The key may be a text that a person has typed.

    Raises:
        ValidationError, ValueError, ArithmeticError, DatabaseError: the model's primary key cannot have this value.
    """
    return f"{(model._meta.concrete_model or model)._meta.label_lower}:{_stored_key(model, key, using)}"


def _stored_key(model: type[Model], key: object, using: str) -> object:
    """
    Return a primary key as PostgreSQL writes it.

    PostgreSQL converts the key, unless Python is known to write a key of this type in the same way.
    """
    field = model._meta.pk
    if isinstance(key, tuple) or field is None:
        return key
    while (remote := getattr(field, "target_field", None)) is not None:  # the primary key is a foreign key
        field = remote
    connection = connections[using]
    value, kind = field.get_db_prep_value(field.to_python(key), connection), field.cast_db_type(connection) or ""
    if isinstance(value, str) and kind.startswith(("varchar", "text")):
        return str.__str__(value)
    if (type(value), kind) == (UUID, "uuid") or (type(value) is int and kind in ("smallint", "integer", "bigint")):
        return value
    # The savepoint is there because PostgreSQL may reject a key that a person typed.
    with atomic_block(using), connection.cursor() as cursor:
        cursor.execute(f"SELECT {key_text(f'CAST(%s AS {kind})', kind)}", [value])
        return cursor.fetchone()[0]


def key_text(key: str, kind: str) -> str:
    """Return the SQL that converts a key of a type (`kind`) to text, with the same result in any time zone of the session."""
    return f"({key} AT TIME ZONE 'UTC')::text || '+00'" if kind.startswith("timestamp with") else f"{key}::text"


def _database_of(subject: str, about: Model, using: str | None) -> str | None:
    """Return the database of a row, or None for an unsaved one. Raise WrongDatabase if `using` is given and is another one."""
    if not isinstance(about, Model):
        raise InvalidMessage(f"{subject} is about {about!r}, which is not a model instance.", hint="Pass the row itself.")
    if about.pk is None or (isinstance(about.pk, tuple) and None in about.pk) or hasattr(about.pk, "resolve_expression"):
        raise InvalidMessage(
            f"{subject} is about a row of {about._meta.label} that has no primary key.",
            hint="Publish after it is saved, and before it is deleted; after bulk_create(), read keys that the database made.",
        )
    # The row may have been read from a replica, so this is the database to which it is written.
    row_database = about._state.db and router.db_for_write(about._meta.model, instance=about)
    if using and row_database and using not in (row_database, about._state.db):
        raise WrongDatabase(
            f"{subject} would go to database {using!r}, but {describe(about, row_database)} lives in {row_database!r}; "
            "no transaction spans both.",
            hint="Leave using= out, or publish about a row of that database.",
        )
    return row_database


def _warn_of_rows_elsewhere(subject: str, alias: str) -> None:
    """Log a warning if only transactions of other databases have run statements, since the message's rows are probably there."""
    if _has_begun(connections[alias]):
        return
    others = [other for other in connections.all(initialized_only=True) if other.alias != alias and other.vendor == "postgresql"]
    begun = [other.alias for other in others if guarded.is_in_callers_transaction(other.alias) and _has_begun(other)]
    if begun:
        logger.warning(
            "%s is published to database %r, whose transaction has run no statement yet, but a transaction of %s has. If the "
            "message's rows are there, pass about= or using=, because no transaction spans both databases.",
            *(subject, alias, ", ".join(map(repr, sorted(begun)))),
            extra=log_fields(database=alias),
        )


def _has_begun(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a statement was run in the open transaction, since psycopg sends BEGIN only with the first statement."""
    raw = connection.connection
    return raw is not None and raw.info.transaction_status != TransactionStatus.IDLE


def _not_in_transaction(subject: str, alias: str) -> NotInTransaction:
    """Return the error that says why nothing was published, and how to open a transaction here."""
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
        text += f" Transactions are open in: {', '.join(sorted(elsewhere))}."
        hint = (
            "If the rows are there, pass using= or about=; "
            f"otherwise open one with @transactional(using={alias!r}) or `with outbox.atomic({alias!r}):`."
        )
        return NotInTransaction(text, hint)
    hint = (
        "Decorate the view or function with @transactional, or use `with outbox.atomic():`, around publish() and the statements "
        "that write the rows. In an on_commit() hook their transaction is over, and another thread does not share it; a receiver "
        "of post_save is in a transaction only if its caller has opened one."
    )
    return NotInTransaction(text, hint)


def is_in_event_loop() -> bool:
    """Return whether a coroutine runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
