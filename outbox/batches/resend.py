"""
What a person does about messages that an audit found lost behind the outbox: have them sent again.

3 -> 0 of the state machine. The message leaves its batch for a batch of one, same lane and number, so that what was missing
is there again under the number it was missed by; a batch of one goes back itself. A message row that nothing would ever
send gets a ticket.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from psycopg.rows import class_row

from outbox.batches.dead import WAKE, RetryResult
from outbox.database import Connection

logger = logging.getLogger(__name__)

# One at a time: who comes second sees what the first has done.
LOCK = "SELECT pg_advisory_xact_lock(7712, 1)"

# Where messages stand now, and when they were last sent.
STANDING = "SELECT id, state, batch_id, position, sent_at FROM outbox_message_state WHERE id = ANY(%s)"

LEAVE_BATCH = """
WITH b AS (
    UPDATE outbox_batch SET split = split || %(position)s::smallint
    WHERE id = %(batch)s AND state = 3 AND %(position)s::smallint <> ALL(split) AND cardinality(message_ids) > 1 RETURNING *
)
INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, order_keys, state, attempt, due_at)
SELECT b.topic_id, b.lane, b.first_seq + %(position)s - 1, b.message_ids[%(position)s:%(position)s],
    b.order_keys[%(position)s:%(position)s], 0, b.attempt, clock_timestamp()
FROM b
"""

RETURN_BATCH = """
UPDATE outbox_batch SET state = 0, tries = 0, due_at = clock_timestamp(), half_ids = NULL, open = NULL
WHERE id = %(batch)s AND state = 3 AND cardinality(message_ids) = 1
"""

GIVE_TICKET = """
INSERT INTO outbox_ticket (message_id, topic_id, order_key)
SELECT m.id, m.topic_id, CASE WHEN t.ordered THEN hashtextextended(m.key, m.topic_id) END
FROM outbox_message m JOIN outbox_topic t ON t.id = m.topic_id WHERE m.id = %s
"""

GONE = "The outbox does not have it: it was pruned, or never recorded."
SENT_SINCE = "It was sent again since that audit looked."
REFUSED = {
    "dead": "It is dead: send it again from the dead messages.",
    "skipped": "It was dead, and somebody let it rest.",
}


@dataclass(frozen=True, slots=True)
class _Standing:
    id: UUID
    state: str
    batch_id: int | None
    position: int | None
    sent_at: datetime | None


def send_again(connection: Connection, message_ids: Sequence[UUID], *, lost_before: datetime) -> RetryResult:
    """
    Have sent messages sent once more, and stranded ones for the first time; what is on its way stays as it is.

    Args:
        connection: in a transaction, READ COMMITTED.
        lost_before: when they were seen to be lost; what was sent later is left alone.
    """
    settled = RetryResult()
    connection.execute(LOCK)
    rows = connection.cursor(row_factory=class_row(_Standing)).execute(STANDING, [list(message_ids)]).fetchall()
    standing = {row.id: row for row in rows}
    settled.refuse([one for one in message_ids if one not in standing], GONE)
    for row in standing.values():
        if reason := _objection(row, lost_before):
            settled.refuse([row.id], reason)
        else:
            _release(connection, row)
            settled.messages += 1
    if settled.messages:
        logger.info("%s messages that were lost are sent again by hand", settled.messages)
        connection.execute(WAKE)
    return settled


def _objection(row: _Standing, lost_before: datetime) -> str:
    """Say why a message is not sent again; empty: it is."""
    if row.state not in ("sent", "lost"):
        return REFUSED.get(row.state, f"It is on its way: {row.state}.")
    return SENT_SINCE if row.sent_at is not None and row.sent_at > lost_before else ""


def _release(connection: Connection, row: _Standing) -> None:
    place = {"batch": row.batch_id, "position": row.position}
    if row.state == "lost":
        connection.execute(GIVE_TICKET, [row.id])
    elif not connection.execute(LEAVE_BATCH, place).rowcount:
        connection.execute(RETURN_BATCH, place)
