"""
Take over: who finds a decided batch whose decider's time is over ends its half messages in the decider's place.

Where a second COMMIT makes a second copy, only one process may end a half message, and only before `ends_until`. So this
renews `ends_until`, in one statement: two sweepers never get one batch, its decider sends no more ends, and check-backs
about it are UNKNOWN meanwhile.

Where a second end does no harm, nobody needs to: `read_prepared` returns the batches as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from outbox.batches.batch import PreparedBatch
from outbox.database import Connection
from outbox.models import State

# So long after the last end may have left, none is done any more. A broker that was frozen performs the ends that waited at
# its port when it goes on: after 8 s it did 40 of 40. What is looked up sooner may be published a moment later.
SETTLE = timedelta(seconds=10)

COLUMNS = """b.id, b.attempt, o.name, b.message_ids::text[], b.half_ids, b.half_places, b.open, b.split, b.tries, b.decided_at,
    b.ends_until, (SELECT id FROM outbox_source)"""

# Batches of one message and of 500 alike: oldest first, until so many messages are reached; the very first in any case.
PAGE = """
    SELECT id FROM (SELECT id, sum(messages) OVER (ORDER BY id) - messages AS before FROM waiting) w
    WHERE before < %(messages)s"""

TAKE_OVER = f"""
WITH waiting AS (
    SELECT b.id, cardinality(b.message_ids) AS messages
    FROM outbox_batch b JOIN outbox_topic o ON o.id = b.topic_id AND o.broker = %(broker)s
    WHERE b.state = {State.PREPARED}
    AND coalesce(b.ends_until, b.decided_at + %(window)s) < clock_timestamp() - %(settle)s
    ORDER BY b.id LIMIT %(batches)s FOR UPDATE OF b SKIP LOCKED),
page AS ({PAGE}),
b AS (
    UPDATE outbox_batch t SET ends_until = clock_timestamp() + %(window)s FROM page WHERE t.id = page.id RETURNING t.*)
SELECT {COLUMNS} FROM b JOIN outbox_topic o ON o.id = b.topic_id ORDER BY b.id
"""

# Whoever took a batch over later has changed `ends_until`.
RENEW = f"""
UPDATE outbox_batch b SET ends_until = clock_timestamp() + %s
FROM unnest(%s::bigint[], %s::bigint[], %s::timestamptz[]) s(id, attempt, ends_until)
WHERE b.id = s.id AND b.state = {State.PREPARED} AND b.attempt = s.attempt AND b.ends_until = s.ends_until RETURNING b.id
"""

# `after`: those that stay open starve nobody.
READ_PREPARED = f"""
WITH waiting AS (
    SELECT b.id, cardinality(b.message_ids) AS messages
    FROM outbox_batch b JOIN outbox_topic o ON o.id = b.topic_id AND o.broker = %(broker)s
    WHERE b.state = {State.PREPARED} AND b.decided_at < clock_timestamp() - %(age)s AND b.id > %(after)s
    ORDER BY b.id LIMIT %(batches)s),
page AS ({PAGE})
SELECT {COLUMNS} FROM outbox_batch b JOIN page USING (id) JOIN outbox_topic o ON o.id = b.topic_id ORDER BY b.id
"""


@dataclass(frozen=True, slots=True)
class Limit:
    """How much is taken at once, whichever is reached first; the last batch may go beyond `messages`."""

    batches: int
    messages: int


def take_over(connection: Connection, *, broker: str, window: timedelta, limit: Limit) -> list[PreparedBatch]:
    """
    Take prepared batches over whose decider's time is over, oldest first.

    Args:
        window: how long the caller may end their half messages, from before this call on.
    """
    arguments = {"broker": broker, "window": window, "settle": SETTLE, "batches": limit.batches, "messages": limit.messages}
    return [_prepared(row) for row in connection.execute(TAKE_OVER, arguments).fetchall()]


def renew(connection: Connection, batches: Iterable[PreparedBatch], *, window: timedelta) -> set[int]:
    """
    Renew the time in which the caller may end batches that it took over: looking half messages up may take as long.

    Args:
        window: how long the caller may end their half messages, from before this call on.

    Returns:
        The ids of those that nobody else has taken over meanwhile.
    """
    chosen = list(batches)
    seen = [[one.id for one in chosen], [one.attempt for one in chosen], [one.ends_until for one in chosen]]
    return {row[0] for row in connection.execute(RENEW, [window, *seen]).fetchall()}


def read_prepared(connection: Connection, *, broker: str, age: timedelta, after: int, limit: Limit) -> list[PreparedBatch]:
    """
    Return prepared batches that anybody may end, since a second end does no harm; oldest first.

    Args:
        age: those that were decided more recently are still their relay's.
        after: the batch behind which to begin.
    """
    arguments = {"broker": broker, "age": age, "after": after, "batches": limit.batches, "messages": limit.messages}
    return [_prepared(row) for row in connection.execute(READ_PREPARED, arguments).fetchall()]


def _prepared(row: tuple[Any, ...]) -> PreparedBatch:
    batch_id, attempt, topic, message_ids, half_ids, half_places, open_positions, split, tries, *times, source = row
    left = range(1, len(message_ids) + 1) if open_positions is None else open_positions
    positions = [position for position in left if position not in split]
    places = {position: place for position, place in enumerate(half_places or [], 1) if place}
    return PreparedBatch(batch_id, attempt, topic, message_ids, half_ids, positions, tries, places, source, *times)
