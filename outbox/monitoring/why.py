"""Explain why a message is not sent yet, or not handled yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

from psycopg.rows import namedtuple_row

from outbox import conf
from outbox.consuming.deferred import HELD, Reason
from outbox.consuming.register import groups
from outbox.consuming.subscriptions import groups_without_code_for
from outbox.database import Connection
from outbox.findings import Finding, unreachable_broker
from outbox.message import Header, read_headers
from outbox.models import UNFINISHED, State
from outbox.monitoring.attention import hangs, no_answer, no_consumer, no_relay, paused, process_fails, unknown_topic
from outbox.monitoring.processes import ProcessStatus, read_processes
from outbox.monitoring.text import age, count, of_unsent, pause

# A message with its topic, batch and ticket. The owner of a batch is the number of the lane whose relay claimed it.
MESSAGE = """
SELECT current.state, current.topic_id, current.topic, coalesce(topic.broker, '') AS broker, coalesce(topic.type, '') AS type,
    coalesce(topic.paused, false) AS is_paused, coalesce(topic.paused_by, '') AS paused_by,
    coalesce(topic.pause_reason, '') AS pause_reason,
    extract(epoch FROM clock_timestamp() - topic.paused_at)::float8 AS paused_seconds, current.key, current.batch_id,
    current.failures, coalesce(current.last_error, '') AS last_error, batch.owner AS lane,
    extract(epoch FROM current.due_at - clock_timestamp())::float8 AS due_seconds,
    extract(epoch FROM batch.lease_until - clock_timestamp())::float8 AS lease_seconds,
    extract(epoch FROM clock_timestamp() - batch.decided_at)::float8 AS decided_seconds,
    coalesce(ticket.order_key, batch.order_keys[current.position]) AS order_key, ticket.pos, message.headers
FROM outbox_message_state current
LEFT JOIN outbox_topic topic ON topic.id = current.topic_id JOIN outbox_message message ON message.id = current.id
LEFT JOIN outbox_batch batch ON batch.id = current.batch_id LEFT JOIN outbox_ticket ticket ON ticket.message_id = current.id
WHERE current.id = %s
"""

# The first unsent message before the message `id` with the same topic and order key: in an unfinished or dead batch, otherwise
# with an earlier ticket. If the message itself is in a batch, only batches before it count. A batch that was split off is in the
# order of `origin_id`, the batch that it was split off from.
HEAD = f"""
SELECT id FROM (
    SELECT 0 AS rank, coalesce(b.origin_id, b.id) AS claim, b.first_seq AS seq,
        b.message_ids[array_position(b.order_keys, %(key)s)] AS id FROM outbox_batch b
    WHERE b.topic_id = %(topic)s AND (b.state IN {UNFINISHED} OR b.state = {State.DEAD}) AND %(key)s = ANY(b.order_keys)
      AND (%(batch)s::bigint IS NULL OR (coalesce(b.origin_id, b.id), b.first_seq)
        < (SELECT coalesce(own.origin_id, own.id), own.first_seq FROM outbox_batch own WHERE own.id = %(batch)s))
    UNION ALL
    SELECT 1, 0, pos, message_id FROM outbox_ticket WHERE topic_id = %(topic)s AND order_key = %(key)s AND pos < %(pos)s
) earlier WHERE id <> %(id)s ORDER BY rank, claim, seq LIMIT 1
"""

# The number of messages with an earlier ticket in the same topic, counted up to 100,000.
AHEAD = "SELECT count(*) FROM (SELECT FROM outbox_ticket WHERE topic_id = %s AND pos < %s LIMIT 100000) earlier"

# The inbox rows of a message: the group; whether the delivery count is 0, because the group had no handler for the message and
# ignored it, or an operator discarded it; and the operator who discarded it, "" if none did.
ENDED = """
SELECT consumer_group, delivery_count = 0, coalesce((
    SELECT acted_by FROM outbox_operator_act act WHERE act.message_id = inbox.message_id
    AND act.consumer_group = inbox.consumer_group AND act.act = 'discarded' ORDER BY id DESC LIMIT 1), '')
FROM outbox_inbox inbox WHERE message_id = %s
"""

# The rows of a message in the groups that have deferred it. `behind` is the first message that the same group deferred earlier,
# with the same topic and key, and that is not dead: the message waits for it. `own_id` is a message's id as it was sent, which
# need not be a UUID.
DEFERRED = """
SELECT consumer_group, reason, failures, crashes, error, dead_at IS NOT NULL AS is_dead,
    coalesce(due_at >= %(held)s, false) AS is_held,
    extract(epoch FROM due_at - clock_timestamp())::float8 AS due_seconds,
    extract(epoch FROM clock_timestamp() - no_code_since)::float8 AS no_code_seconds,
    coalesce((SELECT own_id FROM outbox_deferred head
        WHERE head.order_key = d.order_key AND head.dead_at IS NULL AND head.id < d.id ORDER BY head.id LIMIT 1), '') AS behind
FROM outbox_deferred d WHERE message_id = %(id)s
"""

# Why a message was deferred: a clause for a sentence about it.
REASONS: dict[str, str] = {
    Reason.AGAIN: "it was delivered before, and may have killed its process",
    Reason.BEHIND: "an earlier message of its key was not handled yet",
    Reason.ELSEWHERE: "another process was handling it",
    Reason.NO_HANDLER: "the process that received it has no handler",
    Reason.STOP: "its consumer was stopped",
    Reason.SLOW: "it waited behind a slow handler",
    Reason.SERVER: "the broker moved it to its dead-letter queue",
    Reason.LOST: "it was lost on the way to the group, and sent again",
}


def why(connection: Connection, message_id: UUID, *, using: str) -> str | None:
    """
    Return a sentence that says what a message waits for, or that it was handled; None if no message has that id.

    Args:
        using: alias of the message's database, for the commands that the sentence names.
    """
    message: Any = connection.cursor(row_factory=namedtuple_row).execute(MESSAGE, [message_id]).fetchone()
    if message is None:
        return None
    match message.state:
        case "sent":
            return " ".join(_explain_sent(connection, message_id, message))
        case "dead":
            act = f"outbox_replay --unsent {message_id}{of_unsent(using)}"
            return f"It is dead: {message.last_error.rstrip('.')}. Replay it with {act}, or add --discard."
        case "discarded":
            return "An operator has discarded it, so it is not sent."
        case "lost":
            return "It has no ticket, delayed row or batch: rows were deleted by hand, or a restore was incomplete."
        case "prepared":
            return (
                f"Its half message is stored, and its commit, decided {age(message.decided_seconds)} ago, is not confirmed. "
                "The relay looks it up and commits it again, or the broker checks back."
            )
    return _explain_unsent(connection, message_id, message, using)


def _explain_unsent(connection: Connection, message_id: UUID, message: Any, using: str) -> str:
    """Return why a message is not sent yet: because of its topic, of an earlier message of its key, or of its state."""
    relays = [process for process in read_processes(connection) if process.does == ("relay", message.broker, "")]
    if finding := _why_topic_waits(message, relays, using):
        return finding.line
    if reason := _why_key_waits(connection, message_id, message, using):
        return reason
    failed = (
        f"Sending failed {count(message.failures, 'time')}, last: {message.last_error.rstrip('.')}. " if message.failures else ""
    )
    due = message.due_seconds or 0.0
    match message.state:
        case "delayed":
            return f"It is due in {age(max(0.0, due))}." if due > 0 else "It has just become due, and is sent next."
        case "claimed":
            lease = f", with a lease for another {age(message.lease_seconds)}" if (message.lease_seconds or 0) > 0 else ""
            names = (f"Relay {relay.name}" for relay in relays if relay.lane == message.lane)
            return f"{failed}{next(names, f'The relay of lane {message.lane}')} is sending it{lease}."
        case "released" | "retrying":
            return f"{failed}The next try is {f'in {age(due)}' if due > 0 else 'now'}."
    [ahead] = connection.execute(AHEAD, [message.topic_id, message.pos]).fetchone() or (0,)
    if ahead:
        return f"It waits for the relay, behind {count(ahead, 'message')} of its topic."
    return "It is the next message that the relay sends."


def _why_topic_waits(message: Any, relays: list[ProcessStatus], using: str) -> Finding | None:
    """Return the finding that says why no message of the topic is sent at present; None if nothing stops the topic."""
    live = [relay for relay in relays if not relay.is_silent]
    if message.topic not in conf.settings().topics:
        return unknown_topic(message.topic, 1)
    if message.is_paused:  # the cause says for how long, so the finding gets None for that
        cause = f"It is {pause(message.paused_by, message.paused_seconds, message.pause_reason)}."
        return paused(message.topic, cause, None, using=using)
    if not live:
        return no_relay(message.broker, relays)
    if all(process.error for process in live):
        return process_fails(live[0], "relay")
    if all(process.breaker == "open" for process in live):
        return unreachable_broker(message.broker, no_answer(live[0]), message.last_error)
    return None


def _why_key_waits(connection: Connection, message_id: UUID, message: Any, using: str) -> str:
    """Return a sentence about the earlier message of the same key that a message waits for; "" if there is none."""
    if message.order_key is None or message.state == "claimed":
        return ""
    values = {"key": message.order_key, "topic": message.topic_id, "batch": message.batch_id, "pos": message.pos}
    row = connection.execute(HEAD, values | {"id": message_id}).fetchone()
    if row is None:
        return ""
    head: Any = connection.cursor(row_factory=namedtuple_row).execute(MESSAGE, [row[0]]).fetchone()
    because = {
        "dead": f"which is dead: replay or discard it with outbox_replay --unsent{of_unsent(using)}",
        "released": "which is sent first",
        "retrying": "whose send failed and is retried first",
    }.get(head.state if head else "", "which is sent first")
    return f"It waits behind message {row[0]} of the same key {message.key!r}, {because}."


def _explain_sent(connection: Connection, message_id: UUID, message: Any) -> Iterator[str]:
    """Yield "It was sent.", then sentences about each group that ignored it, that it was discarded for, or that it waits for."""
    inbox_rows = connection.execute(ENDED, [message_id]).fetchall()
    finished_groups = {name for name, _, _ in inbox_rows}
    discarded_by = {name: by for name, _, by in inbox_rows if by}
    ignoring_groups = {name for name, is_ignored, _ in inbox_rows if is_ignored and name not in discarded_by}
    rows: list[Any] = connection.cursor(row_factory=namedtuple_row).execute(DEFERRED, {"id": message_id, "held": HELD}).fetchall()
    deferred = {row.consumer_group: row for row in rows if row.consumer_group not in finished_groups}
    processes = read_processes(connection)
    headers = read_headers(message.headers)
    type_name, tag = headers.get(Header.TYPE, ""), headers.get(Header.TAG, "")
    subscribed = [group.name for group in groups().values() if group.find(message.topic, type_name, tag)]
    without_handler = [
        name
        for name in groups_without_code_for(connection, message.topic, type_name, tag)
        if name not in (*finished_groups, *deferred)
    ]
    waiting_groups = [name for name in dict.fromkeys([*subscribed, *deferred]) if name not in finished_groups]
    if waiting_groups or without_handler or discarded_by or ignoring_groups:
        yield "It was sent."
    else:
        yield (
            "It was sent, and every known group has handled it."
            if finished_groups
            else "It was sent. No consumer group is known that reads it."
        )
    for name in sorted(ignoring_groups):
        again = " Deliver it again with outbox_replay --ignored." if name in subscribed else ""
        yield f"Group {name!r} ignored it: no live process of the group had a handler for it.{again}"
    for name, by in sorted(discarded_by.items()):
        yield f"It was discarded for group {name!r} by {by}."
    for name in without_handler:
        yield f"Group {name!r}, which reads the topic and has no handler for it in this release, has not handled it."
    for name in waiting_groups:
        consumers = [process for process in processes if process.does == ("consumer", message.broker, name)]
        live = [process for process in consumers if not process.is_silent]
        handling_it = [process for process in live if process.handling and process.handling.message_id == str(message_id)]
        silent_seconds = min((process.silent_seconds for process in consumers), default=None)
        # The line says: "No consumer is running (…), and it waits."
        absent = no_consumer(name, "it waits", silent_seconds, has_code=name in groups()).line
        if (row := deferred.get(name)) and row.is_dead:
            cause = row.error or REASONS.get(row.reason, "it cannot be handled")
            yield f"Group {name!r}: dead letter: {cause.rstrip('.')}. Replay or discard it with outbox_replay."
        elif handling_it and (handling := handling_it[0].handling):
            yield f"Group {name!r} has been handling it for {age(handling.seconds)}, with {handling.handler}."
            yield from (finding.line for finding in hangs(handling_it[0]))
        elif row:
            yield f"Group {name!r}: {_explain_deferred(row)}"
            if not live and not row.is_held:
                yield absent
        elif not live:
            yield absent
        elif all(process.error for process in live):
            yield process_fails(live[0], "consumer").line
        else:
            yield f"Group {name!r} has not handled it yet."


def _explain_deferred(row: Any) -> str:
    """Return a sentence that says what a deferred message that is not dead waits for."""
    if row.is_held:
        return "an operator holds it. outbox_replay --retry-now ends that."
    if row.behind:
        return f"it waits behind message {row.behind} of the same key."
    if row.no_code_seconds is not None:
        return f"no live process of the group has had a handler for it for {age(row.no_code_seconds)}."
    failed = f"its handler failed {count(row.failures, 'time')}" if row.failures else "it could not be handled"
    due = row.due_seconds or 0.0
    error = f" Last: {row.error.rstrip('.')}." if row.error else ""
    unfinished_runs = f", {count(row.crashes, 'run')} never ended" if row.crashes else ""
    cause = failed if row.failures else REASONS.get(row.reason, failed)
    return f"deferred: {cause}{unfinished_runs}, next run {f'in {age(due)}' if due > 0 else 'now'}.{error}"
