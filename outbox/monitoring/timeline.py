"""
The timeline of one message, from its row, batches, failed sends, check-backs, dead copy, and its rows of consumer groups.

There is no table of events: the timeline is assembled from rows that relays, consumers and brokers in a database have written
for their own purposes. A broker on a server is asked separately, with `Broker.find`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace
from psycopg.rows import namedtuple_row

from outbox import conf, database
from outbox.brokers.base import StoredCopy
from outbox.brokers.capabilities import StoredInDatabase
from outbox.consuming.acts import GroupState, read_group_states
from outbox.database import Connection
from outbox.models import Act, State
from outbox.models.check_back import show_answer
from outbox.monitoring.text import count

MESSAGE_STATE = """
SELECT message.topic, coalesce(topic.broker, ''), message.state, message.created_at, message.due_at
FROM outbox_message_state message LEFT JOIN outbox_topic topic ON topic.id = message.topic_id WHERE message.id = %s
"""

# Batches that contain a message, or from which it was split off (`has_left`). The newest message of such a batch is the message
# itself or only slightly newer. So it is enough to read 500 batches along the index of their newest ids, from the message's id
# on.
BATCHES = """
SELECT id, lane, first_seq + position - 1 AS number, half_ids[position] AS half_id, position::smallint = ANY(split) AS has_left,
    state, attempt, failures, claimed_at, decided_at, sent_at, due_at, last_error
FROM (
    SELECT b.*, array_position(b.message_ids, %(id)s::uuid) AS position FROM outbox_batch b
    WHERE outbox_newest(message_ids) >= %(id)s ORDER BY outbox_newest(message_ids) LIMIT 500
) near WHERE position IS NOT NULL ORDER BY id
"""

FAILED_SENDS = """
SELECT failed_at, verdict, reason, batch_id, attempt FROM outbox_failed_send
WHERE batch_id = ANY(%(batches)s) AND %(id)s::uuid = ANY(message_ids) ORDER BY id + 0 DESC LIMIT 50
"""

UNPROVEN = "unproven"  # the verdict on a message of which it is unknown whether it was published

# The newest rows about a message in other tables. Each SELECT must find the message by an index and sort the result, so ORDER BY
# has expressions for which there is no index: otherwise the planner may scan all rows in the order of time.
RECORDS = """
(SELECT 'check-back' AS kind, answered_at AS at, asked_by AS who, asked AS count, answer AS outcome, reason AS text,
    '' AS traceback, half_id, sent_answer, '' AS acted_by
    FROM outbox_check_back WHERE message_id = %(id)s::text ORDER BY id + 0 DESC LIMIT 50)
UNION ALL (SELECT 'inbox', handled_at, consumer_group, delivery_count, '', '', '', '', '', ''
    FROM outbox_inbox inbox WHERE message_id = %(id)s AND NOT (delivery_count = 0 AND EXISTS (
        SELECT FROM outbox_operator_act act WHERE act.message_id = %(id)s AND act.consumer_group = inbox.consumer_group
        AND act.act = 'discarded')) ORDER BY handled_at + interval '0' DESC LIMIT 50)
UNION ALL SELECT 'deferred', deferred_at, consumer_group, failures, reason, error, '', '', '', ''
    FROM outbox_deferred WHERE message_id = %(id)s
UNION ALL SELECT 'dead letter', dead_at, consumer_group, failures, reason, error, '', '', '', ''
    FROM outbox_deferred WHERE message_id = %(id)s AND dead_at IS NOT NULL
UNION ALL (SELECT 'delivery', failed_at, consumer_group, delivery_count, outcome, error, traceback, '', '', ''
    FROM outbox_failed_delivery WHERE message_id = %(id)s ORDER BY id + 0 DESC LIMIT 50)
UNION ALL (SELECT 'act', acted_at, consumer_group, 0, act, reason, '', '', '', acted_by
    FROM outbox_operator_act WHERE message_id = %(id)s ORDER BY id + 0 DESC LIMIT 50)
UNION ALL (SELECT 'duplicate', dropped_at, consumer_group, delivery_count, '', '', '', '', '', ''
    FROM outbox_duplicate WHERE message_id = %(id)s ORDER BY id + 0 DESC LIMIT 50)
UNION ALL SELECT 'dead', died_at, '', 0, '', reason, '', '', '', '' FROM outbox_dead WHERE message_id = %(id)s
"""


class Severity(enum.StrEnum):
    """The severity of an entry, which decides its colour."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    WAITING = "waiting"


# Acts of operators on dead messages, and on messages that a group has not handled.
ACTS: dict[str, tuple[str, Severity]] = {
    Act.REPLAYED: ("Replayed", Severity.PLAIN),
    Act.RETRIED_NOW: ("Retried now", Severity.PLAIN),
    Act.HELD: ("Held", Severity.BAD),
    Act.DELIVERED_AGAIN: ("Delivered again", Severity.PLAIN),
    Act.DISCARDED: ("Discarded", Severity.BAD),
}


class TimelineEntry(msgspec.Struct, frozen=True):
    """
    An event in the life of a message.

    Args:
        who: the consumer group or the broker; of a check-back, where it came from (endpoint, broker, command or admin).
        by: the operator who acted, or the command and the user who ran it.
    """

    at: datetime
    what: str
    text: str = ""
    who: str = ""
    traceback: str = ""
    severity: Severity = Severity.PLAIN
    by: str = ""


class Timeline(msgspec.Struct, frozen=True):
    """
    The timeline of a message.

    Args:
        state: as in `outbox_message_state`.
        entries: in the order of time.
        ended: the groups that know the message and have not handled it, each with deferred, dead letter or discarded.
    """

    topic: str
    broker: str
    state: str
    due_at: datetime | None
    entries: list[TimelineEntry]
    ended: list[GroupState]


def read_timeline(using: str, message_id: UUID) -> Timeline | None:
    """
    Return the timeline of a message; None if no message has that id. `why` returns what it waits for.

    Args:
        using: alias of the message's database, which is read over Django's connection.
    """
    connection = database.raw(using)
    row = connection.execute(MESSAGE_STATE, [message_id]).fetchone()
    if row is None:
        return None
    topic, broker, state, created_at, due_at = row
    batches: list[Any] = connection.cursor(row_factory=namedtuple_row).execute(BATCHES, {"id": message_id}).fetchall()
    records: list[Any] = connection.cursor(row_factory=namedtuple_row).execute(RECORDS, {"id": message_id}).fetchall()
    halves = {batch.half_id for batch in batches if batch.half_id} | {record.half_id for record in records if record.half_id}
    entries = [
        TimelineEntry(created_at, "Published", f"in topic {topic}, by the publisher's transaction"),
        *(entry for batch in batches for entry in _of_batch(batch)),
        *_failed_sends(connection, message_id, [batch.id for batch in batches]),
        *map(_of_record, records),
        *_stored(message_id, broker, halves),
    ]
    ended = read_group_states([message_id], using).get(message_id, [])
    return Timeline(topic, broker, state, due_at, sorted(entries, key=lambda entry: entry.at), ended)


def _of_batch(batch: Any) -> Iterator[TimelineEntry]:
    """Yield the entries of a batch; only the claim if the message was split off from it later."""
    numbered = "" if batch.number is None else f" as number {batch.number} of lane {batch.lane}"
    again = "" if batch.attempt == 1 else f"; it is at attempt {batch.attempt}"
    if batch.claimed_at:
        yield TimelineEntry(batch.claimed_at, "Claimed", f"in batch {batch.id}{numbered}{again}")
    if batch.has_left:
        return
    if batch.decided_at:
        if batch.half_id:
            yield TimelineEntry(batch.decided_at, "Half message sent", f"half message {batch.half_id}, stored by then")
        yield TimelineEntry(
            batch.decided_at, "Commit decided", f"batch {batch.id}, attempt {batch.attempt}", severity=Severity.GOOD
        )
    if batch.sent_at and batch.state == State.SENT:
        what = "Committed" if batch.half_id else "Sent"
        yield TimelineEntry(batch.sent_at, what, "the broker has confirmed it", severity=Severity.GOOD)
    if batch.due_at and batch.state == State.RELEASED:
        after = f", after {count(batch.failures, 'failure')}" if batch.failures else ""
        text = f"to be claimed again: {batch.last_error}{after}" if batch.last_error else f"to be claimed again{after}"
        yield TimelineEntry(batch.due_at, "Released", text, severity=Severity.WAITING)


def _failed_sends(connection: Connection, message_id: UUID, batches: Sequence[int]) -> Iterator[TimelineEntry]:
    if batches:
        for failed_at, verdict, reason, batch_id, attempt in connection.execute(
            FAILED_SENDS, {"id": message_id, "batches": list(batches)}
        ).fetchall():
            text = f"batch {batch_id}, attempt {attempt}: {reason}"
            what = "Not confirmed" if verdict == UNPROVEN else f"Not sent: {verdict}"
            yield TimelineEntry(failed_at, what, text, severity=Severity.BAD)


def _of_record(record: Any) -> TimelineEntry:
    delivery = f"delivery {record.count}" if record.count > 1 else ""
    entry = TimelineEntry(record.at, "", who=record.who)
    match record.kind:
        case "check-back":
            severity = Severity.WAITING if record.outcome == "UNKNOWN" else Severity.PLAIN
            text = f"check-back {record.count} about half message {record.half_id or '(not decided)'}: {record.text}"
            answer = show_answer(record.outcome, record.sent_answer)
            return replace(entry, what=f"Check-back: {answer}", text=text, severity=severity)
        case "inbox":
            if record.count == 0:
                return replace(entry, what="Ignored", text="the group had no handler for it")
            return replace(entry, what="Handled", text=delivery, severity=Severity.GOOD)
        case "delivery":
            text = f"delivery {record.count}: {record.text}"
            return replace(entry, what="Failed", text=text, traceback=record.traceback, severity=Severity.BAD)
        case "deferred":
            return replace(entry, what="Deferred", text=record.outcome, severity=Severity.WAITING)
        case "dead letter":
            return replace(entry, what="Dead letter", text=record.text or record.outcome, severity=Severity.BAD)
        case "act":
            what, severity = ACTS[record.outcome]
            return replace(entry, what=what, text=record.text, severity=severity, by=record.acted_by)
        case "duplicate":
            return replace(entry, what="Dropped as a duplicate", text=delivery)
        case _:
            return replace(entry, what="Dead", text=record.text, severity=Severity.BAD)


def _stored(message_id: UUID, broker: str, half_ids: set[str]) -> Iterator[TimelineEntry]:
    """Yield the entries of a message's copies at its broker, and of its half messages, if the broker is stored in a database."""
    if broker in conf.settings().brokers and issubclass(kind := conf.broker_class(broker), StoredInDatabase):
        home = conf.database_of_broker(broker)
        for copy in kind.read_copies(home, database.raw(home), str(message_id), sorted(half_ids)):
            if copy.stored_at is not None:  # always, since the copies are in tables
                yield from _of_copy(copy, copy.stored_at)


def _of_copy(copy: StoredCopy, stored_at: datetime) -> Iterator[TimelineEntry]:
    if copy.state == "visible":
        yield TimelineEntry(stored_at, "Delivered", "visible to consumers", who="broker", severity=Severity.GOOD)
        return
    yield TimelineEntry(stored_at, "Half message stored", f"half message {copy.half_id}, check-backs: {copy.asked}", who="broker")
    if copy.state == "rolled_back" and copy.ended_at:
        yield TimelineEntry(copy.ended_at, "Half message rolled back", f"half message {copy.half_id}", who="broker")
