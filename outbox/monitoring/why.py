"""Why a message is not sent yet, or not handled: one sentence, which names the cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from psycopg.rows import class_row

from outbox import conf
from outbox.consuming.letter_acts import LetterAct
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import groups
from outbox.database import Connection
from outbox.message import Header, read_headers
from outbox.monitoring.processes import ProcessStatus, read_processes
from outbox.monitoring.text import age, count

MESSAGE = """
SELECT s.state, t.id AS topic_id, t.name AS topic, t.broker, t.type, t.paused, t.paused_by, t.pause_reason, s.key, s.batch_id,
    s.tries, coalesce(s.last_error, '') AS last_error, b.owner AS lane,
    extract(epoch FROM s.due_at - clock_timestamp())::float8 AS due_seconds,
    extract(epoch FROM b.lease_until - clock_timestamp())::float8 AS lease_seconds,
    extract(epoch FROM clock_timestamp() - b.decided_at)::float8 AS decided_seconds,
    coalesce(k.order_key, b.order_keys[s.position]) AS order_key, k.pos, m.headers
FROM outbox_message_state s JOIN outbox_topic t ON t.id = s.topic_id JOIN outbox_message m ON m.id = s.id
LEFT JOIN outbox_batch b ON b.id = s.batch_id LEFT JOIN outbox_ticket k ON k.message_id = s.id
WHERE s.id = %s
"""

# The first message of the same key that is not sent: in an unfinished or dead batch, else behind an earlier ticket.
HEAD = """
SELECT id FROM (
    SELECT 0 AS rank, b.first_seq AS place, b.message_ids[array_position(b.order_keys, %(key)s)] AS id FROM outbox_batch b
    WHERE b.topic_id = %(topic)s AND (b.state IN (0, 1, 2) OR b.state = 4) AND %(key)s = ANY(b.order_keys)
      AND b.id IS DISTINCT FROM %(batch)s
    UNION ALL
    SELECT 1, pos, message_id FROM outbox_ticket WHERE topic_id = %(topic)s AND order_key = %(key)s AND pos < %(pos)s
) h WHERE id <> %(id)s ORDER BY rank, place LIMIT 1
"""

AHEAD = "SELECT count(*) FROM (SELECT FROM outbox_ticket WHERE topic_id = %s AND pos < %s LIMIT 100000) k"

# What groups have done with a message, the last failure of each.
HANDLED = "SELECT consumer_group FROM outbox_inbox WHERE message_id = %s"
FAILED = """
SELECT DISTINCT ON (consumer_group) consumer_group, outcome, error, acted_by FROM outbox_delivery WHERE message_id = %s
ORDER BY consumer_group, id + 0 DESC
"""

ACTS: dict[str, str] = {
    LetterAct.REPLAY_ASKED: "to be replayed, which is not confirmed,",
    LetterAct.REPLAYED: "replayed",
    LetterAct.DISCARD_ASKED: "to be discarded, which is not confirmed,",
    LetterAct.DISCARDED: "discarded",
}


@dataclass(frozen=True, slots=True)
class _Message:
    state: str
    topic_id: int
    topic: str
    broker: str
    type: str
    paused: bool
    paused_by: str
    pause_reason: str
    key: str
    batch_id: int | None
    tries: int
    last_error: str
    lane: int | None
    due_seconds: float | None
    lease_seconds: float | None
    decided_seconds: float | None
    order_key: int | None
    pos: int | None
    headers: str


def why(connection: Connection, message_id: UUID) -> str | None:
    """Return in a sentence what a message waits for, or that it has arrived. None: there is no message of that id."""
    message = connection.cursor(row_factory=class_row(_Message)).execute(MESSAGE, [message_id]).fetchone()
    if message is None:
        return None
    match message.state:
        case "sent":
            return " ".join(_of_groups(connection, message_id, message))
        case "dead":
            return f"The broker rejected it: {message.last_error.rstrip('.')}. Send it again, or skip it, with outbox_retry."
        case "skipped":
            return "An operator has skipped it; it is not sent any more."
        case "lost":
            return "No ticket, delayed row or batch has it: rows were deleted by hand, or a restore was incomplete."
        case "prepared":
            return (
                f"Its half message is stored, and its commit, decided {age(message.decided_seconds)} ago, is not confirmed. "
                "The relay looks it up and commits it again, or the broker checks back."
            )
    return _of_unsent(connection, message_id, message)


def _of_unsent(connection: Connection, message_id: UUID, message: _Message) -> str:
    relays = [one for one in read_processes(connection) if one.does == ("relay", message.broker, "")]
    held = _held_up(message, relays) or _behind_head(connection, message_id, message)
    if held:
        return held
    failed = f"Sending failed {count(message.tries, 'time')}, last: {message.last_error.rstrip('.')}. " if message.tries else ""
    due = message.due_seconds or 0.0
    match message.state:
        case "delayed":
            return f"It is due in {age(max(0.0, due))}." if due > 0 else "It was due just now; the relay takes it next."
        case "claimed":
            until = f", which holds it for another {age(message.lease_seconds)}" if (message.lease_seconds or 0) > 0 else ""
            return f"{failed}It is being sent by {_holder(message, relays)}{until}."
        case "released" | "retrying":
            return f"{failed}It is sent again {f'in {age(due)}' if due > 0 else 'now'}."
    [ahead] = connection.execute(AHEAD, [message.topic_id, message.pos]).fetchone() or (0,)
    return f"It waits for the relay, behind {count(ahead, 'message')} of its topic." if ahead else "The relay takes it next."


def _held_up(message: _Message, relays: list[ProcessStatus]) -> str:
    """Return what keeps the whole topic from being sent; empty: nothing does."""
    if message.topic not in conf.settings().topics:
        return f'OUTBOX["TOPICS"] has no topic {message.topic!r}, so no relay takes it. Put the topic back.'
    if message.paused:
        by = f" by {message.paused_by}" if message.paused_by else ""
        reason = f" ({message.pause_reason})" if message.pause_reason else ""
        return f"Topic {message.topic!r} was paused{by}{reason}. Resume it."
    live = [one for one in relays if not one.is_silent]
    if not live:
        last = f": the last heartbeat came {age(relays[0].silent_seconds)} ago" if relays else ""
        return f"No relay of broker {message.broker!r} is running{last}. Start outbox_relay."
    if all(one.breaker == "open" for one in live):
        return f"Broker {message.broker!r} does not answer, so the relay waits; it tries again by itself."
    return ""


def _behind_head(connection: Connection, message_id: UUID, message: _Message) -> str:
    if message.order_key is None or message.state == "claimed":
        return ""
    values = {"key": message.order_key, "topic": message.topic_id, "batch": message.batch_id, "pos": message.pos}
    row = connection.execute(HEAD, values | {"id": message_id}).fetchone()
    if row is None:
        return ""
    head = connection.cursor(row_factory=class_row(_Message)).execute(MESSAGE, [row[0]]).fetchone()
    because = {
        "dead": "which the broker rejected: send it again, or skip it, with outbox_retry",
        "released": "which is sent again first",
        "retrying": "whose send failed and is repeated first",
    }.get(head.state if head else "", "which is sent first")
    return f"It waits behind message {row[0]} of the same key {message.key!r}, {because}."


def _holder(message: _Message, relays: list[ProcessStatus]) -> str:
    for one in relays:
        if one.lane == message.lane:
            return f"the relay {one.name}"
    return f"the relay of lane {message.lane}"


def _of_groups(connection: Connection, message_id: UUID, message: _Message) -> Iterator[str]:
    """Yield a sentence for each group that wants the message and has not handled it."""
    handled = {row[0] for row in connection.execute(HANDLED, [message_id]).fetchall()}
    failed = {group: row for group, *row in connection.execute(FAILED, [message_id]).fetchall()}
    processes = read_processes(connection)
    headers = read_headers(message.headers)
    said = headers.get(Header.TYPE, ""), headers.get(Header.TAG, "")
    wanting = [one for one in groups().values() if one.find(message.topic, *said)]
    waiting = [one for one in wanting if one.name not in handled]
    yield "It was sent, and every group has handled it." if not waiting else "It was sent."
    for group in waiting:
        outcome, error, by = failed.get(group.name, ("", "", ""))
        does = "consumer", message.broker, group.name
        if outcome in ACTS:
            yield f"The dead letter of group {group.name!r} was {ACTS[outcome]} by {by}."
        if outcome in (LetterAct.DISCARDED, LetterAct.DISCARD_ASKED):
            continue
        if outcome == Outcome.DEAD_LETTER:
            yield f"Group {group.name!r} gave it up: {error.rstrip('.')}."
        elif not any(one.does == does and not one.is_silent for one in processes):
            yield f"Group {group.name!r} has no consumer running."
        elif outcome == Outcome.RETRY:
            yield f"Group {group.name!r} failed and gets it again: {error.rstrip('.')}."
        else:
            yield f"Group {group.name!r} has not handled it yet."
