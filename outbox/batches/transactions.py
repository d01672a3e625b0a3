"""
Batches that are sent in transactions of a lane, together with a marker that names them. See `relay/transactions.py`.

A batch records in `tx_lane` and `tx_attempt` the transaction at the broker that may hold it, which the marker names by the same
values. They are written before the transaction begins, with the claim or by `adopt`. If the commit gets no answer, the batch is
in doubt: the lane's marker, read after the lane was fenced, shows whether that transaction was committed. A batch in doubt is
neither split nor sent, and claiming it again keeps both values. A dead or discarded batch is in no transaction, which a
constraint of the table checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from outbox.batches.batch import ClaimedBatch, Transaction
from outbox.batches.fence import take_step
from outbox.batches.steps import DeadNotice, copy_dead
from outbox.database import Connection
from outbox.models import UNFINISHED, State

# The states of a batch whose transaction, if it is in one, is not known to be committed.
MAY_BE_HELD = f"state IN ({State.RELEASED}, {State.CLAIMED})"

ADOPT = f"""
UPDATE outbox_batch SET tx_lane = %(lane)s, tx_attempt = attempt
WHERE id = %(id)s AND state = {State.CLAIMED} AND attempt = %(attempt)s RETURNING id
"""

# The condition names the transaction, not the claim: the batch was published, even if another relay has claimed it since.
MARK_COMMITTED = f"""
UPDATE outbox_batch b SET state = {State.SENT}, sent_at = clock_timestamp(), lease_until = NULL, due_at = NULL
FROM unnest(%(ids)s::bigint[], %(attempts)s::bigint[]) sent(id, attempt)
WHERE b.id = sent.id AND b.tx_lane = %(lane)s AND b.tx_attempt = sent.attempt AND b.{MAY_BE_HELD} RETURNING b.id
"""

# Executed if the transaction never began, or failed before its commit was requested.
WITHDRAW = f"""
UPDATE outbox_batch b SET tx_lane = NULL, tx_attempt = NULL
FROM unnest(%(ids)s::bigint[], %(attempts)s::bigint[]) held(id, attempt)
WHERE b.id = held.id AND b.attempt = held.attempt AND b.tx_lane = %(lane)s AND b.tx_attempt = held.attempt
AND b.state = {State.CLAIMED}
"""

# The batches that a transaction of the lane may hold.
IN_DOUBT = f"""
SELECT batch.id FROM outbox_batch batch JOIN outbox_topic topic ON topic.id = batch.topic_id AND topic.broker = %(broker)s
WHERE batch.state IN {UNFINISHED} AND batch.{MAY_BE_HELD} AND batch.tx_lane = %(lane)s"""

# Record that batches in doubt are in no transaction. Batches that the lane itself had claimed are released; batches that another
# relay has claimed since stay claimed.
FREE = f"""
UPDATE outbox_batch SET tx_lane = NULL, tx_attempt = NULL,
    state = CASE WHEN owner = %(lane)s THEN {State.RELEASED} ELSE state END,
    due_at = CASE WHEN owner = %(lane)s OR state = {State.RELEASED} THEN coalesce(due_at, clock_timestamp()) END,
    lease_until = CASE WHEN owner = %(lane)s THEN NULL ELSE lease_until END
WHERE {MAY_BE_HELD} AND tx_lane = %(lane)s AND id = ANY(ARRAY({IN_DOUBT}))
"""

GIVE_UP_LANE = f"""
UPDATE outbox_batch SET state = {State.DEAD}, tx_lane = NULL, tx_attempt = NULL, lease_until = NULL, due_at = NULL,
    last_error = %(error)s
WHERE {MAY_BE_HELD} AND tx_lane = %(lane)s AND id = ANY(ARRAY({IN_DOUBT})) RETURNING id
"""

GIVE_UP_BATCH = f"""
UPDATE outbox_batch SET state = {State.DEAD}, tx_lane = NULL, tx_attempt = NULL, lease_until = NULL, last_error = %(error)s
WHERE id = %(id)s AND state = {State.CLAIMED} AND attempt = %(attempt)s RETURNING id
"""

# The number of batches that a marker names and this database does not record as sent in that transaction, and of those that it
# has never had (the id is after the last one of its sequence, or the attempt after the last one of the batch).
READ_NAMED = """
SELECT count(*), count(*) FILTER (WHERE batch.attempt < named.attempt OR batch.id IS NULL
    AND named.id > coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox_batch', 'id')), 0))
FROM unnest(%(ids)s::bigint[], %(attempts)s::bigint[]) named(id, attempt)
LEFT JOIN outbox_batch batch ON batch.id = named.id
WHERE batch.id IS NULL OR (batch.tx_lane, batch.tx_attempt) IS DISTINCT FROM (%(lane)s::smallint, named.attempt)
"""


def adopt(connection: Connection, batch: ClaimedBatch, lane: int) -> ClaimedBatch:
    """
    Record that the next transaction of a lane may hold a claimed batch; return the batch with that transaction.

    Any transaction that was recorded before is overwritten, so the caller must know that it was not committed.

    Raises:
        FenceLost: nothing was changed.
    """
    take_step(connection, ADOPT, {"lane": lane, "id": batch.id, "attempt": batch.attempt})
    return replace(batch, transaction=Transaction(lane, batch.attempt))


def mark_committed(connection: Connection, lane: int, named: Iterable[tuple[int, int]]) -> set[int]:
    """
    Mark the batches of a committed transaction SENT.

    Args:
        lane: the lane that sent it.
        named: id and attempt of the batches, as its marker names them.

    Returns:
        The ids of the batches that this call has marked; the others were marked before.
    """
    return {row[0] for row in connection.execute(MARK_COMMITTED, {"lane": lane, **_arrays(named)}).fetchall()}


def withdraw(connection: Connection, lane: int, batches: Iterable[ClaimedBatch]) -> None:
    """Record that batches are in no transaction, since it never began, or failed before its commit was requested."""
    connection.execute(WITHDRAW, {"lane": lane, **_arrays((batch.id, batch.attempt) for batch in batches)})


def settle_lane(connection: Connection, lane: int, broker: str, named: Sequence[tuple[int, int]]) -> set[int]:
    """
    Settle the batches that a lane's transactions have left in doubt, by means of its marker. The caller has opened the lane.

    Batches that the marker names are marked SENT, even if others have claimed them since. The others are recorded as in no
    transaction, and those that the lane itself had claimed are released.

    Returns:
        The ids of the batches that this call has marked SENT.
    """
    with connection.transaction():
        sent = mark_committed(connection, lane, named)
        connection.execute(FREE, {"lane": lane, "broker": broker})
    return sent


def is_in_doubt(connection: Connection, lane: int, broker: str) -> bool:
    """Return whether a transaction of a lane may hold a batch."""
    return connection.execute(f"{IN_DOUBT} LIMIT 1", {"lane": lane, "broker": broker}).fetchone() is not None


def give_up_lane(connection: Connection, lane: int, broker: str, *, error: str) -> list[DeadNotice]:
    """Mark the batches that a lane's transactions left in doubt DEAD, since its marker is lost; return their messages."""
    with connection.transaction():
        dead = connection.execute(GIVE_UP_LANE, {"lane": lane, "broker": broker, "error": error}).fetchall()
        return copy_dead(connection, [row[0] for row in dead])


def give_up_batch(connection: Connection, batch: ClaimedBatch, *, error: str) -> list[DeadNotice]:
    """
    Mark a claimed batch in doubt DEAD, since the marker of its lane is lost; return its messages.

    Raises:
        FenceLost: nothing was changed.
    """
    with connection.transaction():
        take_step(connection, GIVE_UP_BATCH, {"id": batch.id, "attempt": batch.attempt, "error": error})
        return copy_dead(connection, [batch.id])


def read_named(connection: Connection, lane: int, named: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """
    Compare the batches that a lane's marker names with the database, after the lane was settled.

    Returns:
        How many of them are not recorded as sent in that transaction; and how many the database has never had, since it was
        restored to an earlier state, or is another database.
    """
    [(unknown, ahead)] = connection.execute(READ_NAMED, {"lane": lane, **_arrays(named)}).fetchall()
    return unknown, ahead


def _arrays(named: Iterable[tuple[int, int]]) -> dict[str, list[int]]:
    pairs = list(named)
    return {"ids": [batch_id for batch_id, _ in pairs], "attempts": [attempt for _, attempt in pairs]}
