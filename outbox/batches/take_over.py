"""
Take over: if the process that decided a batch has not ended its half messages by `ends_until`, a periodic sweep does so instead.

To end a half message is to commit it or roll it back. On a broker that stores a second copy for a second COMMIT, only one process
may end a half message, and only before `ends_until`. So to take a batch over is to renew its `ends_until` in one statement. Two
sweeps never get the same batch, since a renewed row no longer matches. The process that decided the batch sends no more ends,
since the old `ends_until` has passed. And check-backs about the batch are answered UNKNOWN until the new one.

On a broker on which a second end does no harm, no batch is taken over: `read_prepared` returns the batches unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from outbox.batches.batch import PreparedBatch
from outbox.database import Connection
from outbox.models import State

# A broker may still perform an end that was sent just before `ends_until`: a RocketMQ that was frozen for 8 s then performed all
# 40 ends that were in its socket. So a batch is taken over only LATE_ENDS after `ends_until`: a look-up made sooner could miss a
# message that is published a moment later.
LATE_ENDS = timedelta(seconds=10)

COLUMNS = """batch.id, batch.attempt, topic.name, batch.message_ids::text[], batch.half_ids, batch.half_places, batch.open,
    batch.split, batch.failures, batch.decided_at, batch.ends_until, (SELECT id FROM outbox_source)"""

# The oldest batches, until the sum of their messages reaches the limit (a batch has 1 to 2,000 messages); at least one batch.
PAGE = """
    SELECT id FROM (SELECT id, sum(messages) OVER (ORDER BY id) - messages AS before FROM waiting) counted
    WHERE before < %(messages)s"""

# A batch that was decided without a limit has no `ends_until`; then `window` is counted from the decision.
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

# Renew `ends_until` of batches that the caller has taken over. If another sweep has taken one over meanwhile, its row has another
# `ends_until` and does not match.
RENEW = f"""
UPDATE outbox_batch batch SET ends_until = clock_timestamp() + %s
FROM unnest(%s::bigint[], %s::bigint[], %s::timestamptz[]) held(id, attempt, ends_until)
WHERE batch.id = held.id AND batch.state = {State.PREPARED} AND batch.attempt = held.attempt
AND batch.ends_until = held.ends_until RETURNING batch.id
"""

# Read the oldest decided batches. The caller continues after the last id, so that batches that stay open do not starve later
# ones.
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
    Take over prepared batches whose `ends_until` passed LATE_ENDS ago, oldest first.

    Args:
        window: how long the caller may end their half messages. Read the clock before the call, so that your deadline is never
            later than `ends_until`.
        batches, messages: the maximum number of batches, and of messages in them; the last batch may exceed the latter.
    """
    arguments = {"broker": broker, "window": window, "late_ends": LATE_ENDS, "batches": batches, "messages": messages}
    return [_prepared(row) for row in connection.execute(TAKE_OVER, arguments).fetchall()]


def renew(connection: Connection, batches: Iterable[PreparedBatch], *, window: timedelta) -> set[int]:
    """
    Renew `ends_until` of batches that the caller has taken over, after it has looked up their half messages, which takes time.

    Args:
        window: as for `take_over`.

    Returns:
        The ids of the batches that no other process has taken over meanwhile.
    """
    chosen = list(batches)
    taken_over = [[batch.id for batch in chosen], [batch.attempt for batch in chosen], [batch.ends_until for batch in chosen]]
    return {row[0] for row in connection.execute(RENEW, [window, *taken_over]).fetchall()}


def read_prepared(
    connection: Connection, *, broker: str, age: timedelta, after: int, batches: int, messages: int
) -> list[PreparedBatch]:
    """
    Return prepared batches, oldest first, whose half messages the caller may end if a second end does no harm.

    Args:
        age: batches decided more recently are left to their relay.
        after: id of the batch after which to begin.
        batches, messages: as for `take_over`.
    """
    arguments = {"broker": broker, "age": age, "after": after, "batches": batches, "messages": messages}
    return [_prepared(row) for row in connection.execute(READ_PREPARED, arguments).fetchall()]


def _prepared(row: tuple[Any, ...]) -> PreparedBatch:
    batch_id, attempt, topic, message_ids, half_ids, half_places, open_positions, split, failures, *times, source = row
    remaining = range(1, len(message_ids) + 1) if open_positions is None else open_positions
    positions = [position for position in remaining if position not in split]
    places = {position: place for position, place in enumerate(half_places or [], 1) if place}
    return PreparedBatch(batch_id, attempt, topic, message_ids, half_ids, positions, failures, places, source, *times)
