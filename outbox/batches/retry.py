"""
Retry and skip: what an operator does about dead messages. DEAD to RELEASED, or DEAD to SKIPPED.

One message of a dead batch leaves for a batch of its own; the last one that is left takes the batch itself. A message whose day
was dropped gets its row back from its copy. Who did it and why stands among the failed sends, written by the same statement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from outbox.database import Connection
from outbox.database.partitions import make_day
from outbox.database.wakeup import wake_relay
from outbox.ids import day_of
from outbox.logs import get_logger
from outbox.models import FailedAttempt, State

logger = get_logger(__name__)

BATCHES_AT_ONCE = 100
MESSAGES_AT_ONCE = 500

# The dead batches that hold some messages: how many are left in each, which of them are asked for, and where they stand.
FIND_DEAD = f"""
SELECT b.id, cardinality(b.message_ids) - cardinality(b.split), array_agg(u.id ORDER BY u.n), array_agg(u.n ORDER BY u.n)
FROM outbox_batch b, unnest(b.message_ids) WITH ORDINALITY u(id, n)
WHERE b.state = {State.DEAD} AND u.id = ANY(%s::uuid[]) AND u.n <> ALL(b.split) GROUP BY b.id ORDER BY b.id
"""

DEAD_BATCHES = f"""
SELECT b.id, b.message_ids FROM outbox_batch b JOIN outbox_topic t ON t.id = b.topic_id
WHERE b.state = {State.DEAD} AND b.id > %s AND (%s::text IS NULL OR t.name = %s) ORDER BY b.id LIMIT %s
"""

NOTE = """
INSERT INTO outbox_attempt (batch_id, attempt, message_ids, verdict, reason, acted_by)
SELECT id, attempt, {message_ids}, %(verdict)s::text, %(reason)s::text, %(by)s::text FROM {batches}
"""

# Whole batches: released from the first try on, or skipped. Returns the messages that were left in each.
RETRY = f"""
WITH done AS (
    UPDATE outbox_batch SET state = %(next)s, tries = 0,
        due_at = CASE WHEN %(next)s = {State.RELEASED} THEN clock_timestamp() END
    WHERE id = ANY(%(ids)s) AND state = {State.DEAD}
    RETURNING id, attempt,
        ARRAY(SELECT u.id FROM unnest(message_ids) WITH ORDINALITY u(id, n) WHERE u.n <> ALL(split)) AS left_in_it
), noted AS ({NOTE.format(message_ids="left_in_it", batches="done")})
SELECT left_in_it FROM done
"""

# One message of a dead batch leaves it. Its order key goes with it: the batch stays dead and holds only the others' keys.
# A batch without order stays without: NULL || NULL would be an array of one.
RETRY_ONE = f"""
WITH b AS (
    UPDATE outbox_batch SET split = split || %(position)s::smallint,
        order_keys = CASE WHEN order_keys IS NOT NULL
            THEN order_keys[:%(position)s - 1] || NULL::bigint || order_keys[%(position)s + 1:] END
    WHERE id = %(id)s AND state = {State.DEAD} AND %(position)s::smallint <> ALL(split)
    AND cardinality(message_ids) - cardinality(split) > 1
    RETURNING *
), noted AS ({NOTE.format(message_ids="message_ids[%(position)s:%(position)s]", batches="b")})
INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, order_keys, state, attempt, due_at, last_error)
SELECT b.topic_id, b.lane, b.first_seq + %(position)s - 1, b.message_ids[%(position)s:%(position)s],
    (SELECT o.order_keys[%(position)s:%(position)s] FROM outbox_batch o WHERE o.id = b.id),
    %(next)s, b.attempt, CASE WHEN %(next)s = {State.RELEASED} THEN clock_timestamp() END, b.last_error
FROM b
"""

# Messages without a row, and whether a copy is kept.
WITHOUT_ROW = """
SELECT u.id, EXISTS (SELECT FROM outbox_dead d WHERE d.message_id = u.id AND d.body IS NOT NULL)
FROM unnest(%s::uuid[]) u(id) WHERE NOT EXISTS (SELECT FROM outbox_message m WHERE m.id = u.id)
"""

RESTORE = """
INSERT INTO outbox_message (id, topic_id, key, headers, about, body)
SELECT d.message_id, t.id, d.key, d.headers, d.about, d.body FROM outbox_dead d JOIN outbox_topic t ON t.name = d.topic
WHERE d.message_id = ANY(%s) ON CONFLICT DO NOTHING
"""

TOO_LATE = "Another process changed it first. Look again."


@dataclass(slots=True)
class RetryResult:
    """
    What was done about dead messages.

    Args:
        messages: how many are sent again, or were skipped.
        refused: message id -> why nothing was done about it.
    """

    messages: int = 0
    refused: dict[str, str] = field(default_factory=dict)

    def refuse(self, message_ids: Iterable[UUID], reason: str) -> None:
        """Note why nothing was done about these."""
        self.refused.update({str(message_id): reason for message_id in message_ids})


@dataclass(frozen=True, slots=True)
class _Act:
    """What is done about dead messages, by whom and why."""

    skip: bool
    by: str
    reason: str

    def arguments(self) -> dict[str, object]:
        """Return what the statements take of it."""
        following, verdict = (State.SKIPPED, FailedAttempt.SKIPPED) if self.skip else (State.RELEASED, FailedAttempt.RETRIED)
        return {"next": following, "verdict": verdict, "by": self.by, "reason": self.reason}


def retry_messages(
    connection: Connection, message_ids: Sequence[UUID], *, by: str, reason: str = "", skip: bool = False
) -> RetryResult:
    """
    Send dead messages again, or skip them.

    Args:
        connection: in autocommit, or in a transaction that shall do all of it or nothing.
        by: who does it: a user's name, or a command and who ran it.
        reason: why, in that person's words.
        skip: mark them SKIPPED; they are never sent.
    """
    result, act = RetryResult(), _Act(skip, by, reason)
    for start in range(0, len(message_ids), MESSAGES_AT_ONCE):
        _retry_some(connection, message_ids[start : start + MESSAGES_AT_ONCE], result, act)
    _wake(connection, result, skip=skip)
    return result


def retry_all(connection: Connection, *, by: str, reason: str = "", topic: str | None = None, skip: bool = False) -> RetryResult:
    """
    Send all dead messages, of a topic or at all, again, or skip them.

    Args:
        connection: in autocommit.
        by, reason, skip: as of `retry_messages`.
    """
    result, act = RetryResult(), _Act(skip, by, reason)
    after = 0
    while batches := connection.execute(DEAD_BATCHES, [after, topic, topic, BATCHES_AT_ONCE]).fetchall():
        after = batches[-1][0]
        if not skip:
            _restore(connection, [message_id for _, message_ids in batches for message_id in message_ids])
        arguments = act.arguments() | {"ids": [batch_id for batch_id, _ in batches]}
        result.messages += sum(len(ids) for (ids,) in connection.execute(RETRY, arguments).fetchall())
    _wake(connection, result, skip=skip)
    return result


def _retry_some(connection: Connection, message_ids: Sequence[UUID], result: RetryResult, act: _Act) -> None:
    dead = connection.execute(FIND_DEAD, [list(message_ids)]).fetchall()
    found = [message_id for _, _, ids, _ in dead for message_id in ids]
    result.refuse(set(message_ids) - set(found), "It is not dead.")
    bare = set() if act.skip else set(_restore(connection, found))
    result.refuse(bare, "Its message row is gone, and no copy is kept. Skip it.")
    whole: dict[int, set[UUID]] = {}
    for batch_id, left, ids, positions in dead:
        chosen = {message_id: place for message_id, place in zip(ids, positions, strict=True) if message_id not in bare}
        if len(chosen) == left:
            whole[batch_id] = set(chosen)
        else:
            _retry_each(connection, batch_id, chosen, result, act)
    rows = connection.execute(RETRY, act.arguments() | {"ids": list(whole)}).fetchall() if whole else []
    done = {message_id for (ids,) in rows for message_id in ids}
    result.messages += len(done)
    result.refuse({message_id for ids in whole.values() for message_id in ids} - done, TOO_LATE)


def _retry_each(connection: Connection, batch_id: int, places: Mapping[UUID, int], result: RetryResult, act: _Act) -> None:
    """Take some messages out of a dead batch in which others stay."""
    for message_id, position in places.items():
        arguments = act.arguments() | {"id": batch_id, "position": position}
        if connection.execute(RETRY_ONE, arguments).rowcount:
            result.messages += 1
        else:
            result.refuse([message_id], TOO_LATE)


def _restore(connection: Connection, message_ids: Sequence[UUID]) -> list[UUID]:
    """Write message rows that are gone again from their copies; return those that have none."""
    gone = connection.execute(WITHOUT_ROW, [list(message_ids)]).fetchall()
    kept = [message_id for message_id, has_copy in gone if has_copy]
    for day in sorted({day_of(message_id) for message_id in kept}):
        make_day(connection, day)
    if kept:
        connection.execute(RESTORE, [kept])
    return [message_id for message_id, has_copy in gone if not has_copy]


def _wake(connection: Connection, result: RetryResult, *, skip: bool) -> None:
    if result.messages:
        logger.info("%s dead messages were %s by hand", result.messages, "skipped" if skip else "released")
        wake_relay(connection)
