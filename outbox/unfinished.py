"""What keeps a day of messages in the database: whatever still points into it. Prune and the archive ask alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

# What still points into a day. A dead batch does until each of its messages has a copy.
HOLDS_DAY = """
SELECT CASE
    WHEN EXISTS (SELECT FROM outbox_ticket WHERE message_id >= %(first)s AND message_id < %(end)s) THEN 'waiting messages'
    WHEN EXISTS (SELECT FROM outbox_delayed WHERE message_id >= %(first)s AND message_id < %(end)s) THEN 'delayed messages'
    WHEN EXISTS (
        SELECT FROM outbox_batch, unnest(message_ids) m(id)
        WHERE state IN (0, 1, 2) AND m.id >= %(first)s AND m.id < %(end)s) THEN 'unfinished batches'
    WHEN EXISTS (
        SELECT FROM outbox_batch, unnest(message_ids) WITH ORDINALITY u(id, n)
        WHERE state = 4 AND u.id >= %(first)s AND u.id < %(end)s AND n <> ALL(split)
        AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.message_id = u.id AND d.body IS NOT NULL)
        AND EXISTS (SELECT FROM outbox_message m WHERE m.id = u.id)) THEN 'dead messages without a copy'
END
"""


def find_holder(connection: psycopg.Connection[Any], first: object, end: object) -> str | None:
    """Say what still points at messages whose ids are from `first` up to, not including, `end`; None: nothing does."""
    row = connection.execute(HOLDS_DAY, {"first": first, "end": end}).fetchone()
    assert row is not None
    holder: str | None = row[0]
    return holder
