"""
`publish()` and its variants: write message row and ticket inside the caller's database transaction.

`rules.py` has the rules for messages, `draft.py` turns a message into a draft (validated and encoded), `transactions.py` chooses
the database, and `statements.py` writes the rows with the SQL of `database/message_rows.py`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from asgiref.sync import markcoroutinefunction, sync_to_async
from django.db.models import Model

from outbox import unawaited
from outbox.errors import NotAwaited
from outbox.message import Message, Receipt
from outbox.publishing import rules
from outbox.publishing.draft import Draft, compose, compose_raw
from outbox.publishing.statements import write, write_many
from outbox.publishing.transactions import about_text, choose_database, is_in_event_loop
from outbox.publishing.wakeup import wake_after_commit

__all__ = ["Envelope", "apublish", "publish", "publish_many", "publish_raw"]


class Envelope(msgspec.Struct, frozen=True):
    """
    A message for `publish_many()`, with the arguments that `publish()` takes.

    Args:
        message: the message to publish.
        about: the row that the message is about. The message is stored in the row's database, and the admin links the two.
        key, tag: override those of the type's Meta.
        headers: headers of the caller, in addition to those of the outbox.
        delay: the message is delivered after this time at the earliest.
        idempotency_key: a second message with the same key, within `IDEMPOTENCY_RETENTION`, is not written.
    """

    message: Message
    about: Model | None = None
    key: str | None = None
    tag: str | None = None
    headers: Mapping[str, str] | None = None
    delay: timedelta | None = None
    idempotency_key: str | None = None


def publish(
    message: Message,
    *,
    about: Model | None = None,
    key: str | None = None,
    tag: str | None = None,
    headers: Mapping[str, str] | None = None,
    delay: timedelta | None = None,
    idempotency_key: str | None = None,
    using: str | None = None,
) -> Receipt:
    """
    Write a message in the open transaction. The message is sent if the transaction commits, but not if the transaction, or the
    savepoint around the call, is rolled back.

    Topics of type fifo keep the order of commits per key, so a publisher of a key waits until the previous one has committed.
    Code that publishes several keys in one transaction must use the same order of keys everywhere, or `publish_many()`; otherwise
    PostgreSQL may detect a deadlock and roll one of the transactions back.

    Args:
        about: the row that the message is about; the message is stored in the row's database.
        key, tag: override those of the type's Meta.
        headers: headers of the caller, in addition to those of the outbox.
        delay: the message is delivered after this time at the earliest.
        idempotency_key: a second message with the same key, within `IDEMPOTENCY_RETENTION`, is not written.
        using: the database's alias. By default the database of `about`; without `about`, that of the innermost `atomic()`; and
            otherwise the one that the routers choose for messages.

    Returns:
        The receipt. If `is_duplicate` is True, it is the receipt of the first message with this idempotency key.

    Raises:
        NotInTransaction: the database has no open transaction. Without a transaction around `save()`, a `post_save` receiver
            runs after the row was committed: open the transaction around `save()`.
        WrongDatabase: `about` is in another database than `using`.
        InvalidMessage: the message breaks a rule (`outbox/publishing/rules.py` lists them).
    """
    draft = compose(message, key=key, tag=tag, headers=headers, delay=delay)
    return _publish(draft, about=about, idempotency_key=idempotency_key, using=using)


@markcoroutinefunction
def apublish(
    message: Message,
    *,
    about: Model | None = None,
    key: str | None = None,
    tag: str | None = None,
    headers: Mapping[str, str] | None = None,
    delay: timedelta | None = None,
    idempotency_key: str | None = None,
    using: str | None = None,
) -> Coroutine[Any, Any, Receipt]:
    """
    Publish from a coroutine, in the thread that holds the transaction of `@transactional`.

    Django has no async transactions, so without such a thread NotInTransaction is raised. Everything else is as in `publish()`.
    If a call is not awaited or is made in synchronous code, NotAwaited is raised and the transaction is rolled back.
    """
    if not is_in_event_loop():
        raise NotAwaited("apublish() was called in synchronous code, where nothing awaits it.", hint="Call publish() there.")
    call = sync_to_async(publish)(
        message, about=about, key=key, tag=tag, headers=headers, delay=delay, idempotency_key=idempotency_key, using=using
    )
    unawaited.record(call)
    return call


def publish_raw(
    topic: str,
    body: bytes | Mapping[str, Any],
    *,
    about: Model | None = None,
    key: str = "",
    tag: str = "",
    headers: Mapping[str, str] | None = None,
    content_type: str | None = None,
    delay: timedelta | None = None,
    idempotency_key: str | None = None,
    using: str | None = None,
) -> Receipt:
    """
    Publish a body without a message type; everything else is as in `publish()`.

    Args:
        body: bytes, which are sent unchanged, or a dict, which is encoded as JSON.
        content_type: by default `application/json` for a dict, otherwise `application/octet-stream`.
    """
    draft = compose_raw(topic, body, key=key, tag=tag, headers=headers, content_type=content_type, delay=delay)
    return _publish(draft, about=about, idempotency_key=idempotency_key, using=using)


def publish_many(messages: Iterable[Message | Envelope], *, using: str | None = None) -> list[Receipt]:
    """
    Publish all messages or none, with one INSERT per database; return receipts in the order of the messages.

    Raises the same errors as `publish()`.

    Args:
        messages: messages, or an `Envelope` for a message with other arguments of `publish()` such as a key, a row or a delay.
        using: as for `publish()`.
    """
    envelopes = [message if isinstance(message, Envelope) else Envelope(message) for message in messages]
    drafts = []
    for envelope in envelopes:
        draft = compose(envelope.message, key=envelope.key, tag=envelope.tag, headers=envelope.headers, delay=envelope.delay)
        if envelope.idempotency_key is not None:
            rules.check_idempotency_key(draft.subject, envelope.idempotency_key)
        drafts.append(draft)
    by_database: dict[str, list[int]] = {}
    for n, (draft, envelope) in enumerate(zip(drafts, envelopes, strict=True)):
        by_database.setdefault(choose_database(draft.subject, using=using, about=envelope.about), []).append(n)
    receipts: dict[int, Receipt] = {}
    for alias, indexes in by_database.items():
        entries = [
            (drafts[n], about_text(drafts[n].subject, envelopes[n].about, alias), envelopes[n].idempotency_key) for n in indexes
        ]
        receipts.update(zip(indexes, write_many(entries, alias), strict=True))
        for n in indexes:
            if not receipts[n].is_duplicate:
                _wake_for(drafts[n], alias)
    return [receipts[n] for n in range(len(drafts))]


def publish_drafts(drafts: Sequence[Draft], *, using: str | None = None) -> list[Receipt]:
    """
    Write all drafts or none into one database; return receipts in the order of the drafts.

    Args:
        drafts: at least one draft.
        using: as for `publish()`.

    Raises:
        NotInTransaction: the database has no open transaction.
    """
    alias = choose_database(drafts[0].subject, using=using, about=None)
    if len(drafts) == 1:
        receipts = [write(drafts[0], alias, about=None, idempotency_key=None)]
    else:
        receipts = write_many([(draft, None, None) for draft in drafts], alias)
    for draft in drafts:
        _wake_for(draft, alias)
    return receipts


def _publish(draft: Draft, *, about: Model | None, idempotency_key: str | None, using: str | None) -> Receipt:
    if idempotency_key is not None:
        rules.check_idempotency_key(draft.subject, idempotency_key)
    alias = choose_database(draft.subject, using=using, about=about)
    receipt = write(draft, alias, about=about_text(draft.subject, about, alias), idempotency_key=idempotency_key)
    if not receipt.is_duplicate:
        _wake_for(draft, alias)
    return receipt


def _wake_for(draft: Draft, alias: str) -> None:
    if not draft.wait:
        wake_after_commit(alias, draft.broker)
