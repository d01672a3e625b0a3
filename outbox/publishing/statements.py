"""The statements of publish. Each joins the caller's transaction, over Django's own connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import connections

from outbox import conf, database
from outbox.message import Receipt
from outbox.publishing.draft import Draft
from outbox.publishing.key_locks import lock_key, lock_keys
from outbox.topics import topic_id

# The message row and its ticket; wakes a resident relay if one said that it is idle. Both take their values from here: a
# ticket that selected them from the message row would cost a third more.
INSERT_WAITING = """
WITH m AS (INSERT INTO outbox_message (id, topic_id, key, headers, about, body) VALUES (%s, %s, %s, %s, %s, %s))
INSERT INTO outbox_ticket (message_id, topic_id, order_key) VALUES (%s, %s, %s)
RETURNING (SELECT pg_notify('outbox', '') FROM outbox_idle LIMIT 1)
"""

# The message row, and when it is due; the relay gives it its ticket then.
INSERT_DELAYED = """
WITH m AS (INSERT INTO outbox_message (id, topic_id, key, headers, about, body) VALUES (%s, %s, %s, %s, %s, %s))
INSERT INTO outbox_delayed (message_id, topic_id, due_at) VALUES (%s, %s, clock_timestamp() + %s)
"""

# The same for many messages, tickets in the order given.
INSERT_MANY = """
WITH g AS (
    SELECT * FROM unnest(
        %s::uuid[], %s::int[], %s::text[], %s::text[], %s::text[], %s::bytea[], %s::boolean[], %s::interval[]
    ) WITH ORDINALITY AS g (id, topic_id, key, headers, about, body, is_ordered, wait, nth)
), m AS (
    INSERT INTO outbox_message (id, topic_id, key, headers, about, body)
    SELECT id, topic_id, key, headers, about, body FROM g
), d AS (
    INSERT INTO outbox_delayed (message_id, due_at, topic_id)
    SELECT id, clock_timestamp() + wait, topic_id FROM g WHERE wait > interval '0'
)
INSERT INTO outbox_ticket (message_id, topic_id, order_key)
SELECT id, topic_id, CASE WHEN is_ordered THEN hashtextextended(key, topic_id) END FROM g
WHERE wait = interval '0' ORDER BY nth
RETURNING (SELECT pg_notify('outbox', '') FROM outbox_idle LIMIT 1)
"""

# Takes a dedupe key that is new or expired, one row; none if it is taken. A concurrent publisher of the key is waited for.
TAKE_DEDUPE_KEY = """
INSERT INTO outbox_dedupe AS d (topic_id, dedupe_key, message_id, expires_at)
VALUES (%s, %s, %s, clock_timestamp() + %s)
ON CONFLICT (topic_id, dedupe_key) DO UPDATE SET message_id = excluded.message_id, expires_at = excluded.expires_at
WHERE d.expires_at <= clock_timestamp()
"""

# The message that has a dedupe key. A statement of its own: it sees what the one before waited for. The message's day
# may have been dropped.
FIND_FIRST = """
SELECT d.message_id, coalesce(m.key, '') FROM outbox_dedupe d LEFT JOIN outbox_message m ON m.id = d.message_id
WHERE d.topic_id = %s AND d.dedupe_key = %s
"""


def write(draft: Draft, using: str, *, about: str | None, dedupe_key: str | None) -> Receipt:
    """
    Write one message: one statement, and one before it for an ordered topic, another for a dedupe key.

    Returns:
        The receipt; that of the first message where the dedupe key is taken.
    """
    topic = topic_id(draft.topic, using)
    with database.bound_cursor(using) as cursor:
        if dedupe_key is not None:
            taken: list[Any] = [topic, dedupe_key, draft.id, conf.settings().dedupe_retention]
            cursor.execute(TAKE_DEDUPE_KEY, taken)
            if not cursor.rowcount:
                cursor.execute(FIND_FIRST, [topic, dedupe_key])
                first_id, first_key = cursor.fetchone()
                return Receipt(first_id, draft.topic, first_key, is_duplicate=True)
        order_key = None
        if draft.is_ordered:
            order_key = lock_key(cursor, using, topic, draft.key)
        row: list[Any] = [draft.id, topic, draft.key, draft.headers, about, draft.body, draft.id, topic]
        if draft.wait:
            cursor.execute(INSERT_DELAYED, [*row, draft.wait])  # type: ignore[list-item]  # psycopg takes it
        else:
            cursor.execute(INSERT_WAITING, [*row, order_key])
    return Receipt(draft.id, draft.topic, draft.key)


def write_many(drafts: Sequence[Draft], using: str, *, abouts: Sequence[str | None]) -> list[Receipt]:
    """Write many messages: one statement, and one before it where a topic is ordered."""
    rows = [
        (d.id, topic_id(d.topic, using), d.key, d.headers, about, d.body, d.is_ordered, d.wait)
        for d, about in zip(drafts, abouts, strict=True)
    ]
    with connections[using].cursor() as cursor:
        if ordered := [(row[1], row[2]) for row in rows if row[6]]:
            lock_keys(cursor, using, {topic for topic, _ in ordered}, [key for _, key in ordered])
        columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
        cursor.execute(INSERT_MANY, columns)
    return [Receipt(draft.id, draft.topic, draft.key) for draft in drafts]
