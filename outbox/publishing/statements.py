"""Write messages. Each statement joins the caller's transaction, on Django's own connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from django.db.backends.utils import CursorWrapper

from outbox import database
from outbox.database.message_rows import INSERT_DELAYED, INSERT_MANY, INSERT_WAITING
from outbox.database.wakeup import name_topic
from outbox.message import Receipt
from outbox.publishing.draft import Draft
from outbox.publishing.idempotency_keys import take_idempotency_keys
from outbox.publishing.key_locks import lock_key, lock_keys
from outbox.topics import topic_id

KEPT_BODY_BYTES = 64 * 1024  # a cached cursor keeps the last body in memory, so longer bodies are written with another cursor


Entry = tuple[Draft, str | None, str | None]
"""A draft, the row that the message is about (as `describe` returns it), and the idempotency key."""


def write(draft: Draft, using: str, *, about: str | None, idempotency_key: str | None) -> Receipt:
    """
    Write one message, with one INSERT; before it, one statement for an idempotency key and one for an ordered topic.

    Returns:
        The receipt; if another message has taken the idempotency key, that message's receipt.
    """
    topic = topic_id(draft.topic, using)
    order_key = None
    if idempotency_key is not None or draft.is_ordered:
        with database.bound_cursor(using) as cursor:
            if idempotency_key is not None and (first := take_idempotency_keys(cursor, [((topic, idempotency_key), draft)])):
                return first[draft.id]
            if draft.is_ordered:
                order_key = lock_key(cursor, using, topic, draft.key)
    message_id = draft.id.hex  # a string, because psycopg converts UUIDs in Python code, which is slower
    row: list[Any] = [message_id, topic, draft.key, draft.headers, about, draft.body, message_id, topic]
    if draft.wait:
        statement, row = INSERT_DELAYED, [*row, draft.wait]
    else:
        statement, row = INSERT_WAITING, [*row, order_key, name_topic(topic, draft.broker), draft.broker]
    is_kept = len(draft.body) <= KEPT_BODY_BYTES
    (database.kept_cursor(using, statement) if is_kept else database.bound_cursor(using)).execute(statement, row)
    return Receipt(draft.id, draft.topic, draft.key)


def write_many(entries: Sequence[Entry], using: str) -> list[Receipt]:
    """Write many messages, with one INSERT; before it, one statement if there are idempotency keys and one for ordered topics."""
    topics = {draft.topic: topic_id(draft.topic, using) for draft, _, _ in entries}
    firsts: dict[UUID, Receipt] = {}
    with database.bound_cursor(using) as cursor:  # Django's own cursor would write the bodies into the statement's text
        if keyed := [((topics[draft.topic], key), draft) for draft, _, key in entries if key is not None]:
            firsts = take_idempotency_keys(cursor, keyed)
        _insert(cursor, using, [entry for entry in entries if entry[0].id not in firsts], topics)
    return [firsts.get(draft.id) or Receipt(draft.id, draft.topic, draft.key) for draft, _, _ in entries]


def _insert(cursor: CursorWrapper, using: str, entries: Sequence[Entry], topics: Mapping[str, int]) -> None:
    if not entries:
        return
    rows = [(d.id, topics[d.topic], d.key, d.headers, about, d.body, d.is_ordered, d.wait) for d, about, _ in entries]
    if ordered := [(row[1], row[2]) for row in rows if row[6]]:
        lock_keys(cursor, using, {topic for topic, _ in ordered}, [key for _, key in ordered])
    columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
    brokers = {topics[draft.topic]: draft.broker for draft, _, _ in entries}
    names = [name_topic(topic, broker) for topic, broker in brokers.items()]
    cursor.execute(INSERT_MANY, [*columns, names, list(brokers.values())])
