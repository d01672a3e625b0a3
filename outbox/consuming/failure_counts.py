"""
What is counted of a message in a group: failures of its handler, and crashes, which are runs that were begun and never ended.

The broker's count of deliveries is not used: deployments, outages and slow handlers of other messages cause deliveries too. A
first delivery needs no statement here. Source: docs/explanation/deliveries.md.

What was decided after a failure is written with its count. So a message that comes back before its delay is over, because the
broker did not take the retry or the process died, is handed back and counts nothing; and one that was given up is not handled
again, though its dead letter could not be stored.

A process handles one message at a time whose last run was begun and never ended. If it kills the process, no other is
interrupted. Otherwise messages that were interrupted together would come back together, and be interrupted again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import connections

from outbox.consuming.delivery_info import DeliveryInfo
from outbox.database.locks import Lock

CRASH_LIMIT = 5
EARLY = timedelta(seconds=0.1)  # a message may come so much before its delay is over, by a broker's own clock

DECIDED = """
SELECT greatest(due_at - clock_timestamp(), interval '0') AS early, given_up, has_letter FROM outbox_failure_count
WHERE consumer_group = %(group)s AND message_id = %(message_id)s AND (given_up <> '' OR due_at > clock_timestamp() + %(early)s)
"""

# A run of the handler begins, unless another process handles the message now, its delay is not over, or the group gave it up. One
# that was begun before and has not ended counts as a crash. Committed before the handler begins, so that it is known when the
# process is killed.
BEGIN = f"""
WITH l AS MATERIALIZED (SELECT pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s || ' ' || %(key)s)) AS is_free
), decided AS MATERIALIZED ({DECIDED}), begun AS (
    INSERT INTO outbox_failure_count AS t (consumer_group, message_id, topic, begun_at, begun_by)
    SELECT %(group)s, %(message_id)s, %(topic)s, clock_timestamp(), %(worker)s FROM l
    WHERE is_free AND NOT EXISTS (SELECT FROM decided)
    ON CONFLICT (consumer_group, message_id) DO UPDATE SET crashes = t.crashes + (t.begun_at IS NOT NULL)::int,
        begun_at = excluded.begun_at, begun_by = excluded.begun_by, changed_at = clock_timestamp()
    RETURNING failures, crashes
)
SELECT failures, crashes, early, given_up, has_letter FROM begun FULL JOIN decided ON true
"""

COUNT_FAILURE = """
INSERT INTO outbox_failure_count AS t (consumer_group, message_id, topic, failures)
VALUES (%(group)s, %(message_id)s, %(topic)s, 1)
ON CONFLICT (consumer_group, message_id) DO UPDATE SET failures = t.failures + 1, changed_at = clock_timestamp(),
    begun_at = CASE WHEN t.begun_by <> %(worker)s THEN t.begun_at END
RETURNING failures
"""

DECIDE = """
INSERT INTO outbox_failure_count (consumer_group, message_id, topic, due_at, given_up, has_letter)
VALUES (%(group)s, %(message_id)s, %(topic)s, clock_timestamp() + %(after)s, %(given_up)s, %(has_letter)s)
ON CONFLICT (consumer_group, message_id) DO UPDATE SET due_at = excluded.due_at, given_up = excluded.given_up,
    has_letter = excluded.has_letter, changed_at = clock_timestamp()
"""

END = """
UPDATE outbox_failure_count SET begun_at = NULL, crashes = least(crashes, %(most_crashes)s), changed_at = clock_timestamp()
WHERE consumer_group = %(group)s AND message_id = %(message_id)s AND begun_by = %(worker)s
"""

END_OF_WORKER = "UPDATE outbox_failure_count SET begun_at = NULL WHERE begun_by = %s AND begun_at IS NOT NULL"

FORGET = "DELETE FROM outbox_failure_count WHERE consumer_group = %s AND message_id = ANY(%s)"

UNENDED = """
SELECT message_id FROM outbox_failure_count WHERE consumer_group = %s AND message_id = ANY(%s) AND begun_at IS NOT NULL
"""

Parameters = dict[str, Any] | list[Any]


@dataclass(frozen=True, slots=True)
class Begun:
    """The counts at the beginning of a run."""

    failures: int
    crashes: int


@dataclass(frozen=True, slots=True)
class Decided:
    """
    What was decided after the last failure of a message, and is not done yet.

    Args:
        early: the rest of its delay. None: it has none.
        given_up: why the group gave it up; "" if it did not.
        has_letter: whether the broker has stored its dead letter.
    """

    early: timedelta | None
    given_up: str
    has_letter: bool


def begin(arrival: DeliveryInfo, key: str, worker: str, using: str) -> Begun | Decided | None:
    """Record that a run of the handler begins, unless its message has to wait; None: another process handles it."""
    rows = _rows(using, BEGIN, {**arrival.as_parameters(), "key": key, "worker": worker, "early": EARLY})
    if not rows:
        return None
    failures, crashes, *decision = rows[0]
    return Begun(failures, crashes) if failures is not None else Decided(*decision)


def decided(arrival: DeliveryInfo, using: str) -> Decided | None:
    """Return what was decided about a message, if that is not done yet."""
    rows = _rows(using, DECIDED, {**arrival.as_parameters(), "early": EARLY})
    return Decided(*rows[0]) if rows else None


def count_failure(arrival: DeliveryInfo, worker: str, using: str) -> int:
    """Count a failure, which ends the worker's run; return the number of failures."""
    [(failures,)] = _rows(using, COUNT_FAILURE, {**arrival.as_parameters(), "worker": worker})
    return int(failures)


def decide(
    arrival: DeliveryInfo, using: str, *, after: timedelta = timedelta(), given_up: str = "", has_letter: bool = False
) -> None:
    """Record when a message that failed is due again, or why the group gives it up, and whether its dead letter is stored."""
    _execute(using, DECIDE, {**arrival.as_parameters(), "after": after, "given_up": given_up, "has_letter": has_letter})


def end(arrival: DeliveryInfo, worker: str, using: str, *, most_crashes: int = CRASH_LIMIT) -> None:
    """Record that a worker's run has ended, unless another worker has begun one since."""
    _execute(using, END, {**arrival.as_parameters(), "worker": worker, "most_crashes": most_crashes})


def wait_for_nobody(using: str) -> None:
    """Set the transaction's lock timeout to one second: a statement that waits for another process's handler fails."""
    _execute(using, "SELECT set_config('lock_timeout', '1s', true)", [])


def end_all_of(worker: str, using: str) -> None:
    """Record that all runs of a worker have ended, after an outage in which that could not be recorded."""
    _execute(using, END_OF_WORKER, [worker])


def forget(group: str, message_ids: Collection[UUID], using: str) -> None:
    """Delete the counts of messages."""
    _execute(using, FORGET, [group, list(message_ids)])


def unended(group: str, message_ids: Collection[UUID], using: str) -> set[UUID]:
    """Return the messages whose last run has not ended."""
    return {message_id for (message_id,) in _rows(using, UNENDED, [group, list(message_ids)])}


def _execute(using: str, statement: str, values: Parameters) -> None:
    with connections[using].cursor() as cursor:
        cursor.execute(statement, values)


def _rows(using: str, statement: str, values: Parameters) -> list[tuple[Any, ...]]:
    with connections[using].cursor() as cursor:
        cursor.execute(statement, values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


EXCLUDES_SECONDS = 60.0  # a run that takes longer is slow or stuck, and no longer keeps others waiting

_at_work: list[tuple[UUID, float]] = []  # and since when
_change = threading.Lock()


@contextmanager
def alone(message_id: UUID) -> Iterator[bool]:
    """Yield whether this process handles no other such message while the block runs; a stuck run of the same does not count."""
    me = message_id, time.monotonic()
    with _change:
        is_alone = all(one == message_id or me[1] - since > EXCLUDES_SECONDS for one, since in _at_work)
        if is_alone:
            _at_work.append(me)
    try:
        yield is_alone
    finally:
        if is_alone:
            with _change:
                _at_work.remove(me)
