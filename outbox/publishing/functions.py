"""
Publish: write message row and ticket inside the caller's database transaction.

`rules.py` has what a message must keep, `draft.py` makes a draft of it, `transactions.py` finds its database, `statements.py`
has the statements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.db.models import Model

from outbox.errors import InvalidMessage
from outbox.message import Message, Receipt
from outbox.publishing import rules
from outbox.publishing.draft import Draft, compose, compose_raw
from outbox.publishing.statements import write, write_many
from outbox.publishing.transactions import choose_database, describe
from outbox.publishing.wakeup import wake_after_commit

__all__ = ["apublish", "publish", "publish_many", "publish_raw"]


def publish(
    message: Message,
    *,
    about: Model | None = None,
    key: str | None = None,
    tag: str | None = None,
    headers: Mapping[str, str] | None = None,
    delay: timedelta | None = None,
    dedupe_key: str | None = None,
    using: str | None = None,
) -> Receipt:
    """
    Write a message into the open transaction: it travels if that commits, and is gone if that, or its savepoint, is
    rolled back.

    Topics of type fifo keep the order of the commits per key, so a publisher of a key waits for the one before it. Who
    publishes several keys in one transaction does it in one order everywhere, or by `publish_many()`; else PostgreSQL may
    find a deadlock and roll one of them back.

    Args:
        about: the row the message speaks of; the message goes to its database.
        key, tag: instead of those that the type's Meta names.
        headers: the caller's own, beside those of the outbox.
        delay: not before so long from now.
        dedupe_key: a second message with it, within `DEDUPE_RETENTION`, is not written.
        using: the database; by default that of `about`, of the innermost `transaction()`, of the routers, in this order.

    Returns:
        The receipt. `is_duplicate`: the dedupe key was known, this is the receipt of the first message.

    Raises:
        NotInTransaction: the database has no open transaction.
        WrongDatabase: `about` lives in another database than `using`.
        InvalidMessage: the message breaks a rule (`outbox/publishing/rules.py` lists them).
    """
    draft = compose(message, key=key, tag=tag, headers=headers, delay=delay)
    return _publish(draft, about=about, dedupe_key=dedupe_key, using=using)


async def apublish(
    message: Message,
    *,
    about: Model | None = None,
    key: str | None = None,
    tag: str | None = None,
    headers: Mapping[str, str] | None = None,
    delay: timedelta | None = None,
    dedupe_key: str | None = None,
    using: str | None = None,
) -> Receipt:
    """
    Publish from a coroutine, in the thread that holds its transaction: that of `@transactional`.

    Django has no async transactions. Where no such thread is, this raises NotInTransaction; else as `publish()`.
    """
    return await sync_to_async(publish)(
        message, about=about, key=key, tag=tag, headers=headers, delay=delay, dedupe_key=dedupe_key, using=using
    )


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
    dedupe_key: str | None = None,
    using: str | None = None,
) -> Receipt:
    """
    Publish a body of any kind, as `publish()` does a message of a declared type.

    Args:
        body: bytes as they are, or a dict, written as JSON.
        content_type: by default `application/json` for a dict, else `application/octet-stream`.
    """
    draft = compose_raw(topic, body, key=key, tag=tag, headers=headers, content_type=content_type, delay=delay)
    return _publish(draft, about=about, dedupe_key=dedupe_key, using=using)


def publish_many(
    messages: Iterable[Message],
    *,
    abouts: Sequence[Model | None] | None = None,
    headers: Mapping[str, str] | None = None,
    delay: timedelta | None = None,
    using: str | None = None,
) -> list[Receipt]:
    """
    Publish messages by one statement per database, all or none; receipts come in the order given.

    Args:
        abouts: for each message the row it speaks of, or None.
        headers, delay: for all of them.

    Raises:
        As `publish()`.
    """
    drafts = [compose(message, headers=headers, delay=delay) for message in messages]
    rows = [None] * len(drafts) if abouts is None else list(abouts)
    if len(rows) != len(drafts):
        raise InvalidMessage(f"publish_many() got {len(drafts)} messages and {len(rows)} abouts. Give one for each.")
    homes: dict[str, list[int]] = {}
    for place, (draft, about) in enumerate(zip(drafts, rows, strict=True)):
        homes.setdefault(choose_database(draft.subject, using=using, about=about), []).append(place)
    receipts: dict[int, Receipt] = {}
    for alias, places in homes.items():
        texts = [None if (row := rows[place]) is None else describe(row) for place in places]
        written = write_many([drafts[place] for place in places], alias, abouts=texts)
        receipts.update(zip(places, written, strict=True))
        for place in places:
            _nudge_for(drafts[place], alias)
    return [receipts[place] for place in range(len(drafts))]


def _publish(draft: Draft, *, about: Model | None, dedupe_key: str | None, using: str | None) -> Receipt:
    if dedupe_key is not None:
        rules.check_dedupe_key(draft.subject, dedupe_key)
    alias = choose_database(draft.subject, using=using, about=about)
    receipt = write(draft, alias, about=None if about is None else describe(about), dedupe_key=dedupe_key)
    if not receipt.is_duplicate:
        _nudge_for(draft, alias)
    return receipt


def _nudge_for(draft: Draft, alias: str) -> None:
    if not draft.wait:
        wake_after_commit(alias, draft.broker)
