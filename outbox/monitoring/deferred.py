"""
The deferred messages of consumer groups: their number in each state, how late they are, and the keys with messages asleep.

A deferred message is one that a group knows and has not handled; one that is asleep waits behind an earlier message of its key.
"""

from __future__ import annotations

import msgspec
from psycopg.rows import class_row

from outbox.consuming.deferred import HELD
from outbox.database import Connection

# A row for each group, topic and reason, and one with the reason "" for each group and topic. A waiting message is neither dead
# nor held. `failures` are errors of a handler; a retry that it asked for with RetryLater is none.
COUNTS = """
SELECT consumer_group, topic, coalesce(reason, '') AS reason,
    count(*) FILTER (WHERE is_waiting) AS waiting, count(*) FILTER (WHERE is_waiting AND due_at IS NULL) AS asleep,
    count(*) FILTER (WHERE dead_at IS NULL AND NOT is_waiting) AS held, count(*) FILTER (WHERE dead_at IS NOT NULL) AS dead,
    count(*) FILTER (WHERE dead_at IS NULL AND crashes > 0) AS in_doubt, count(*) FILTER (WHERE is_failing) AS failing,
    count(*) FILTER (WHERE is_waiting AND no_code_since IS NOT NULL) AS without_code,
    count(*) FILTER (WHERE is_waiting AND (due_at IS NULL OR due_at < clock_timestamp() + interval '1 hour')) AS counted,
    sum(octet_length(headers) + octet_length(body))::bigint AS bytes,
    extract(epoch FROM clock_timestamp() - min(due_at) FILTER (WHERE is_waiting AND due_at < clock_timestamp()))::float8
        AS late_seconds,
    extract(epoch FROM clock_timestamp() - min(deferred_at) FILTER (WHERE is_failing))::float8 AS failing_seconds,
    extract(epoch FROM clock_timestamp() - min(dead_at))::float8 AS dead_seconds,
    coalesce(max(fingerprint) FILTER (WHERE is_failing), '') AS error,
    coalesce(max(fingerprint) FILTER (WHERE dead_at IS NOT NULL), '') AS error_of_dead
FROM (
    SELECT *, is_waiting AND failures > 0 AS is_failing
    FROM (SELECT *, dead_at IS NULL AND (due_at IS NULL OR due_at < %(held)s) AS is_waiting FROM outbox_deferred) deferred
) deferred
GROUP BY GROUPING SETS ((consumer_group, topic, reason), (consumer_group, topic)) ORDER BY 1, 2, 3
"""

KEYS = """
SELECT consumer_group, topic, key, count(*) FROM outbox_deferred
WHERE order_key IS NOT NULL AND dead_at IS NULL AND due_at IS NULL GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3 LIMIT %s
"""


class DeferredCount(msgspec.Struct, frozen=True):
    """
    The deferred messages of a group in a topic.

    Args:
        reason: why they were deferred; "" for all reasons together.
        waiting: number of messages that are handled without an act of an operator: due now, due later, or asleep.
        asleep: number of waiting messages that wait for an earlier message of their key.
        held: number of messages that an operator holds.
        dead: number of dead letters.
        in_doubt: number of messages, except dead letters, of which a run was begun and never ended.
        failing: number of waiting messages whose handler has failed.
        without_code: number of waiting messages for which no live process has a handler.
        counted: number of messages that count towards MAX_DEFERRED.
        late_seconds: seconds since the first waiting message became due; None if none is due.
        failing_seconds: seconds since the first failing message was deferred.
        dead_seconds: seconds since the first dead letter became one.
        error, error_of_dead: the fingerprint of an error of the failing messages, and of the dead letters.
    """

    consumer_group: str
    topic: str
    reason: str
    waiting: int
    asleep: int
    held: int
    dead: int
    in_doubt: int
    failing: int
    without_code: int
    counted: int
    bytes: int
    late_seconds: float | None
    failing_seconds: float | None
    dead_seconds: float | None
    error: str
    error_of_dead: str


def read_deferred(connection: Connection) -> list[DeferredCount]:
    """Return the counts of a database by group and topic, all together and for each reason."""
    return connection.cursor(row_factory=class_row(DeferredCount)).execute(COUNTS, {"held": HELD}).fetchall()


def read_sleeping_keys(connection: Connection, *, limit: int) -> list[tuple[str, str, str, int]]:
    """Return the keys with the most messages asleep: group, topic, key, number."""
    return connection.execute(KEYS, [limit]).fetchall()
