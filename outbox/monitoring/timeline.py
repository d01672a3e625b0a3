"""
The life of one message, told from the books: message, batches, failed sends, check-backs, inbox, failures, dead copy.

There is no table of events: each room writes down what it needs, and here it is put in order. What a broker keeps in a database
is read with it; a server is asked by `Broker.find`, on demand.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from uuid import UUID

from psycopg.rows import class_row

from outbox import conf, database
from outbox.brokers.base import StoredCopy
from outbox.brokers.capabilities import StoredInDatabase
from outbox.consuming.letter_acts import GroupEnd, LetterAct, read_ends
from outbox.consuming.outcome import Outcome
from outbox.database import Connection
from outbox.models import FailedAttempt, State
from outbox.models.check_back import show_answer

# Where it stands now.
STANDING = """
SELECT s.topic, t.broker, s.state, s.created_at, s.due_at FROM outbox_message_state s
JOIN outbox_topic t ON t.id = s.topic_id WHERE s.id = %s
"""

# Batches that hold a message, or held it before it was split off. The newest id of such a batch is the message's or a later
# one, and near it: the walk along that index is bounded, and ends long before the bound.
BATCHES = """
SELECT id, lane, first_seq + position - 1 AS number, half_ids[position] AS half_id, position::smallint = ANY(split) AS has_left,
    state, attempt, tries, claimed_at, decided_at, sent_at, due_at, last_error
FROM (
    SELECT b.*, array_position(b.message_ids, %(id)s::uuid) AS position FROM outbox_batch b
    WHERE outbox_newest(message_ids) >= %(id)s ORDER BY outbox_newest(message_ids) LIMIT 500
) near WHERE position IS NOT NULL ORDER BY id
"""

FAILED_SENDS = """
SELECT failed_at, verdict, reason, batch_id, attempt, acted_by FROM outbox_attempt
WHERE batch_id = ANY(%(batches)s) AND %(id)s::uuid = ANY(message_ids) ORDER BY id + 0 DESC LIMIT 50
"""

UNPROVEN = "unproven"  # the verdict on a message that may have been published after all

# What other books say, their newest rows. Each finds the message by an index and sorts what it found: the expressions keep
# the planner from walking all rows by time.
BOOKS = """
(SELECT 'check-back' AS book, answered_at AS at, asked_by AS who, nth, answer AS outcome, reason AS text, '' AS traceback,
    half_id, sent_answer, '' AS acted_by FROM outbox_check_back WHERE message_id = %(id)s::text ORDER BY id + 0 DESC LIMIT 50)
UNION ALL (SELECT 'inbox', handled_at, consumer_group, nth, '', '', '', '', '', ''
    FROM outbox_inbox WHERE message_id = %(id)s ORDER BY handled_at + interval '0' DESC LIMIT 50)
UNION ALL (SELECT 'delivery', failed_at, consumer_group, nth, outcome, error, traceback, '', '', acted_by
    FROM outbox_delivery WHERE message_id = %(id)s ORDER BY id + 0 DESC LIMIT 50)
UNION ALL (SELECT 'duplicate', dropped_at, consumer_group, nth, '', '', '', '', '', ''
    FROM outbox_duplicate WHERE message_id = %(id)s ORDER BY id + 0 DESC LIMIT 50)
UNION ALL SELECT 'dead', died_at, '', 0, '', reason, '', '', '', '' FROM outbox_dead WHERE message_id = %(id)s
"""


class Severity(enum.StrEnum):
    """How a moment is to be read."""

    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    WAITING = "waiting"


# What operators did about dead messages, and about dead letters.
DEAD_ACTS = {FailedAttempt.RETRIED: "Sent again by hand", FailedAttempt.SKIPPED: "Skipped by hand"}
LETTER_ACTS: dict[str, tuple[str, Severity]] = {
    LetterAct.REPLAY_ASKED: ("To be replayed, not confirmed", Severity.WAITING),
    LetterAct.REPLAYED: ("Replayed", Severity.PLAIN),
    LetterAct.DISCARD_ASKED: ("To be discarded, not confirmed", Severity.BAD),
    LetterAct.DISCARDED: ("Discarded", Severity.BAD),
}
REPLAYS = (LetterAct.REPLAY_ASKED, LetterAct.REPLAYED)


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """
    Something that happened to a message.

    Args:
        who: the group, broker or door it happened at.
        by: the person who did it, or the command with who ran it.
    """

    at: datetime
    what: str
    text: str = ""
    who: str = ""
    traceback: str = ""
    tone: Severity = Severity.PLAIN
    by: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """
    A message's life so far.

    Args:
        state: as in `outbox_message_state`.
        moments: in order of time.
        ended: how it ended in the groups that gave it up and have not handled it since.
    """

    topic: str
    broker: str
    state: str
    due_at: datetime | None
    moments: list[TimelineEntry]
    ended: list[GroupEnd]


@dataclass(frozen=True, slots=True)
class _Batch:
    id: int
    lane: int | None
    number: int | None
    half_id: str | None
    has_left: bool
    state: int
    attempt: int
    tries: int
    claimed_at: datetime | None
    decided_at: datetime | None
    sent_at: datetime | None
    due_at: datetime | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class _Entry:
    book: str
    at: datetime
    who: str
    nth: int
    outcome: str
    text: str
    traceback: str
    half_id: str
    sent_answer: str
    acted_by: str


def read_timeline(using: str, message_id: UUID) -> Timeline | None:
    """
    Return the timeline of a message; None where no message has that id. What it waits for is in `why`.

    Args:
        using: the database that holds it, asked over Django's connection.
    """
    connection = database.raw(using)
    row = connection.execute(STANDING, [message_id]).fetchone()
    if row is None:
        return None
    topic, broker, state, created_at, due_at = row
    batches = connection.cursor(row_factory=class_row(_Batch)).execute(BATCHES, {"id": message_id}).fetchall()
    entries = connection.cursor(row_factory=class_row(_Entry)).execute(BOOKS, {"id": message_id}).fetchall()
    halves = {batch.half_id for batch in batches if batch.half_id} | {entry.half_id for entry in entries if entry.half_id}
    moments = [
        TimelineEntry(created_at, "Recorded", f"in topic {topic}, by the transaction it speaks of"),
        *(moment for batch in batches for moment in _of_batch(batch)),
        *_failed_sends(connection, message_id, [batch.id for batch in batches]),
        *map(_of_entry, entries),
        *_stored(message_id, broker, halves),
    ]
    ended = read_ends([message_id], using).get(message_id, [])
    return Timeline(topic, broker, state, due_at, sorted(moments, key=lambda moment: moment.at), ended)


def _of_batch(batch: _Batch) -> Iterator[TimelineEntry]:
    """Yield what a batch says. One that the message has left says only when it was claimed, and what was decided before."""
    numbered = "" if batch.number is None else f" as number {batch.number} of lane {batch.lane}"
    again = "" if batch.attempt == 1 else f"; it is at attempt {batch.attempt}"
    if batch.claimed_at:
        yield TimelineEntry(batch.claimed_at, "Claimed", f"in batch {batch.id}{numbered}{again}")
    if batch.has_left:
        return
    if batch.decided_at:
        if batch.half_id:
            yield TimelineEntry(batch.decided_at, "Half sent", f"half message {batch.half_id}, stored by then")
        yield TimelineEntry(
            batch.decided_at, "Decided", f"batch {batch.id} is to be committed, attempt {batch.attempt}", tone=Severity.GOOD
        )
    if batch.sent_at and batch.state == State.SENT:
        what = "Committed" if batch.half_id else "Sent"
        yield TimelineEntry(batch.sent_at, what, "the broker has confirmed it", tone=Severity.GOOD)
    if batch.due_at and batch.state == State.RELEASED:
        tries = f", after {batch.tries} tries that failed" if batch.tries else ""
        yield TimelineEntry(
            batch.due_at, "To be claimed again", f"{batch.last_error or 'given back'}{tries}", tone=Severity.WAITING
        )


def _failed_sends(connection: Connection, message_id: UUID, batches: Sequence[int]) -> Iterator[TimelineEntry]:
    if batches:
        for failed_at, verdict, reason, batch_id, attempt, acted_by in connection.execute(
            FAILED_SENDS, {"id": message_id, "batches": list(batches)}
        ).fetchall():
            if verdict in DEAD_ACTS:
                yield TimelineEntry(failed_at, DEAD_ACTS[verdict], reason, by=acted_by)
                continue
            text = f"batch {batch_id}, attempt {attempt}: {reason}"
            what = "Not confirmed" if verdict == UNPROVEN else f"Not sent: {verdict}"
            yield TimelineEntry(failed_at, what, text, tone=Severity.BAD)


def _of_entry(entry: _Entry) -> TimelineEntry:
    nth = f"delivery {entry.nth}" if entry.nth > 1 else ""
    moment = TimelineEntry(entry.at, "", who=entry.who)
    match entry.book:
        case "check-back":
            tone = Severity.WAITING if entry.outcome == "UNKNOWN" else Severity.PLAIN
            text = f"ask {entry.nth} about half message {entry.half_id or '(not decided)'}: {entry.text}"
            answer = show_answer(entry.outcome, entry.sent_answer)
            return replace(moment, what=f"Check-back: {answer}", text=text, tone=tone)
        case "inbox":
            if entry.nth == 0:
                return replace(moment, what="Passed over", text="no handler of the group wanted it")
            return replace(moment, what="Handled", text=nth, tone=Severity.GOOD)
        case "delivery":
            return _of_delivery(entry, moment)
        case "duplicate":
            return replace(moment, what="Dropped as a duplicate", text=nth)
        case _:
            return replace(moment, what="Given up", text=entry.text, tone=Severity.BAD)


def _of_delivery(entry: _Entry, moment: TimelineEntry) -> TimelineEntry:
    if act := LETTER_ACTS.get(entry.outcome):
        what, tone = act
        return replace(moment, what=what, text=entry.text, tone=tone, by=entry.acted_by)
    what = "Dead letter" if entry.outcome == Outcome.DEAD_LETTER else "Failed, to be retried"
    text = f"delivery {entry.nth}: {entry.text}"
    return replace(moment, what=what, text=text, traceback=entry.traceback, tone=Severity.BAD)


def _stored(message_id: UUID, broker: str, half_ids: set[str]) -> Iterator[TimelineEntry]:
    """Yield what the broker keeps in a database; a server is not asked."""
    entry = conf.settings().brokers.get(broker)
    if entry is not None and (kind := conf.broker_class(broker)).is_stored_in_database:
        for copy in StoredInDatabase.of(kind).read_copies(entry.options, str(message_id), sorted(half_ids)):
            yield from _of_copy(copy)


def _of_copy(copy: StoredCopy) -> Iterator[TimelineEntry]:
    assert copy.stored_at is not None, "what stands in a table has its time"
    if copy.state == "visible":
        yield TimelineEntry(copy.stored_at, "Delivered", "visible to consumers", who="broker", tone=Severity.GOOD)
        return
    yield TimelineEntry(
        copy.stored_at, "Half stored", f"half message {copy.half_id}, asked about {copy.asked} times", who="broker"
    )
    if copy.state == "rolled_back" and copy.ended_at:
        yield TimelineEntry(copy.ended_at, "Half rolled back", f"half message {copy.half_id}", who="broker")
