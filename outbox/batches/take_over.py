"""
Take over: a sweep ends the half messages of a decided batch in its decider's place, when the decider's time is over.

Where a second COMMIT makes a second copy, only one process may end a half message, and only before `ends_until`. So taking
over renews `ends_until`, in one statement: two sweeps never get the same batch, its decider sends no more ends, and the
answer to check-backs about it is UNKNOWN meanwhile.

Where a second end does no harm, no batch is taken over: `read_prepared` returns the batches unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from outbox.batches.batch import PreparedBatch
from outbox.database import Connection
from outbox.models import State

# A broker may still perform an end that was sent just before `ends_until`: a RocketMQ that was frozen for 8 s performed all 40
# ends that were in its socket when it went on. So a batch is taken over this time after `ends_until`: a message that was not
# there at a look-up before might be published a moment later.
LATE_ENDS = timedelta(seconds=10)

COLUMNS = """batch.id, batch.attempt, topic.name, batch.message_ids::text[], batch.half_ids, batch.half_places, batch.open,
    batch.split, batch.failures, batch.decided_at, batch.ends_until, (SELECT id FROM outbox_source)"""

# The oldest batches until their messages reach the limit, whether a batch has one message or 500; at least the first one.
PAGE = """
    SELECT id FROM (SELECT id, sum(messages) OVER (ORDER BY id) - messages AS before FROM waiting) counted
    WHERE before < %(messages)s"""

TAKE_OVER = f"""
WITH waiting AS (
    SELECT batch.id, cardinality(batch.message_ids) AS messages
    FROM outbox_batch batch JOIN outbox_topic topic ON topic.id = batch.topic_id AND topic.broker = %(broker)s
    WHERE batch.state = {State.PREPARED}
    AND coalesce(batch.ends_until, batch.decided_at + %(window)s) < clock_timestamp() - %(late_ends)s
    ORDER BY batch.id LIMIT %(batches)s FOR UPDATE OF batch SKIP LOCKED),
page AS ({PAGE}),
batch AS (
    UPDATE outbox_batch taken SET ends_until = clock_timestamp() + %(window)s FROM page
    WHERE taken.id = page.id RETURNING taken.*)
SELECT {COLUMNS} FROM batch JOIN outbox_topic topic ON topic.id = batch.topic_id ORDER BY batch.id
"""

# A batch that another sweep took over meanwhile has another `ends_until`.
RENEW = f"""
UPDATE outbox_batch batch SET ends_until = clock_timestamp() + %s
FROM unnest(%s::bigint[], %s::bigint[], %s::timestamptz[]) held(id, attempt, ends_until)
WHERE batch.id = held.id AND batch.state = {State.PREPARED} AND batch.attempt = held.attempt
AND batch.ends_until = held.ends_until RETURNING batch.id
"""

# `after`: batches that stay open do not starve the others.
READ_PREPARED = f"""
WITH waiting AS (
    SELECT batch.id, cardinality(batch.message_ids) AS messages
    FROM outbox_batch batch JOIN outbox_topic topic ON topic.id = batch.topic_id AND topic.broker = %(broker)s
    WHERE batch.state = {State.PREPARED} AND batch.decided_at < clock_timestamp() - %(age)s AND batch.id > %(after)s
    ORDER BY batch.id LIMIT %(batches)s),
page AS ({PAGE})
SELECT {COLUMNS} FROM outbox_batch batch JOIN page USING (id) JOIN outbox_topic topic ON topic.id = batch.topic_id
ORDER BY batch.id
"""


def take_over(connection: Connection, *, broker: str, window: timedelta, batches: int, messages: int) -> list[PreparedBatch]:
    """
    Take over prepared batches whose decider's time is over, oldest first.

    Args:
        window: how long the caller may end their half messages, counted from before this call.
        batches, messages: the page ends when either number is reached; its last batch may exceed that of messages.
    """
    arguments = {"broker": broker, "window": window, "late_ends": LATE_ENDS, "batches": batches, "messages": messages}
    return [_prepared(row) for row in connection.execute(TAKE_OVER, arguments).fetchall()]


def renew(connection: Connection, batches: Iterable[PreparedBatch], *, window: timedelta) -> set[int]:
    """
    Renew the time in which the caller may end batches that it took over, since looking their half messages up takes time.

    Args:
        window: how long the caller may end their half messages, counted from before this call.

    Returns:
        The ids of the batches that no other process has taken over meanwhile.
    """
    chosen = list(batches)
    held = [[batch.id for batch in chosen], [batch.attempt for batch in chosen], [batch.ends_until for batch in chosen]]
    return {row[0] for row in connection.execute(RENEW, [window, *held]).fetchall()}


def read_prepared(
    connection: Connection, *, broker: str, age: timedelta, after: int, batches: int, messages: int
) -> list[PreparedBatch]:
    """
    Return prepared batches, oldest first. The caller may end them where a second end does no harm.

    Args:
        age: batches decided more recently are left to their relay.
        after: id of the batch after which to begin.
        batches, messages: as for `take_over`.
    """
    arguments = {"broker": broker, "age": age, "after": after, "batches": batches, "messages": messages}
    return [_prepared(row) for row in connection.execute(READ_PREPARED, arguments).fetchall()]


def _prepared(row: tuple[Any, ...]) -> PreparedBatch:
    batch_id, attempt, topic, message_ids, half_ids, half_places, open_positions, split, failures, *times, source = row
    left = range(1, len(message_ids) + 1) if open_positions is None else open_positions
    positions = [position for position in left if position not in split]
    places = {position: place for position, place in enumerate(half_places or [], 1) if place}
    return PreparedBatch(batch_id, attempt, topic, message_ids, half_ids, positions, failures, places, source, *times)
