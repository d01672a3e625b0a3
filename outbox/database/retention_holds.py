"""What pruning and the archive both ask of daily partitions: which there are, and which unfinished rows keep one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

# Daily partitions; the name of each, `c.relname`, ends with its day. A partition with another name is an operator's, who has
# renamed or attached it. It is left alone, whatever ids it has.
FROM_DAYS = """
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'outbox_message'::regclass AND c.relname ~ '^outbox_message_[0-9]{4}(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])$'
"""

# Rows that refer to messages of a day. A dead batch keeps the day until each of its messages has a copy in outbox_dead. States
# are numbers here, because jobs without Django run this statement, too: 0, 1, 2 are the unfinished states, 4 is DEAD.
HOLDS_DAY = """
SELECT CASE
    WHEN EXISTS (SELECT FROM outbox_ticket WHERE message_id >= %(first)s AND message_id < %(end)s) THEN 'waiting messages'
    WHEN EXISTS (SELECT FROM outbox_delayed WHERE message_id >= %(first)s AND message_id < %(end)s) THEN 'delayed messages'
    WHEN EXISTS (
        SELECT FROM outbox_batch, unnest(message_ids) member(id)
        WHERE state IN (0, 1, 2) AND member.id >= %(first)s AND member.id < %(end)s) THEN 'unfinished batches'
    WHEN EXISTS (
        SELECT FROM outbox_batch, unnest(message_ids) WITH ORDINALITY member(id, position)
        WHERE state = 4 AND member.id >= %(first)s AND member.id < %(end)s AND position <> ALL(split)
        AND NOT EXISTS (SELECT FROM outbox_dead dead WHERE dead.message_id = member.id AND dead.body IS NOT NULL)
        AND EXISTS (SELECT FROM outbox_message message WHERE message.id = member.id)) THEN 'dead messages without a copy'
END
"""


def find_holder(connection: psycopg.Connection[Any], first: object, end: object) -> str | None:
    """Return the kind of rows that still need messages with ids from `first` up to, but not including, `end`; None if none do."""
    holder: str | None
    [(holder,)] = connection.execute(HOLDS_DAY, {"first": first, "end": end}).fetchall()
    return holder
