"""
Deliver messages to one group again: messages that were lost on the way, and messages that the group ignored.

A lost message has a number in an open gap of the group. An ignored message has an inbox row, since no live process of the group
had a handler for it. The outbox that published them still has them, until they are pruned. They become deferred messages of the
group, so that its consumers handle them. If the broker still delivers a copy, the copy is dropped.
docs/explanation/deliveries.md explains gaps and ignored messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from outbox import conf, database
from outbox.batches.batch import ClaimedBatch
from outbox.brokers.base import Delivery
from outbox.consuming import subscriptions
from outbox.consuming.deferred import Deferral, Reason, defer
from outbox.consuming.register import Group, groups
from outbox.database import guarded
from outbox.message import Header, TopicType, read_headers
from outbox.models import Act, State
from outbox.relay.cloudevents import OutgoingBuilder

LISTED = 1000  # maximum number of messages of a gap, and of ignored messages of a group

SOURCE = "SELECT id FROM outbox_source"

# The open gaps of all groups: ranges of numbers that have not arrived.
GAPS = """
SELECT consumer_group, source, topic, lane, first_number, last_number FROM outbox_gap
WHERE closed_at IS NULL ORDER BY consumer_group, topic, source, lane, first_number
"""

# The messages with a range of numbers, and their headers, which are NULL if the message row is gone.
NUMBERED = """
SELECT b.first_seq + u.n - 1, u.id, m.headers, b.state
FROM outbox_topic t JOIN outbox_batch b ON b.topic_id = t.id AND b.lane = %(lane)s
    AND b.first_seq <= %(last)s AND b.first_seq + cardinality(b.message_ids) > %(first)s
CROSS JOIN unnest(b.message_ids) WITH ORDINALITY u (id, n)
LEFT JOIN outbox_message m ON m.id = u.id AND m.topic_id <> 0
WHERE t.name = %(topic)s AND u.n <> ALL (b.split) AND b.first_seq + u.n - 1 BETWEEN %(first)s AND %(last)s
ORDER BY 1 LIMIT %(limit)s
"""

# The inbox rows of ignored messages have delivery_count 0; so have those of messages that an operator discarded.
_IS_IGNORED = """consumer_group = %(group)s AND delivery_count = 0 AND NOT EXISTS (
    SELECT FROM outbox_operator_act a
    WHERE a.message_id = i.message_id AND a.consumer_group = i.consumer_group AND a.act = 'discarded')"""

IGNORED = f"""
SELECT source, topic, lane, number, message_id FROM outbox_inbox i
WHERE {_IS_IGNORED} AND (%(since)s::timestamptz IS NULL OR handled_at >= %(since)s)
ORDER BY handled_at DESC LIMIT %(limit)s
"""  # noqa: S608  (only constants are interpolated)

HEADERS = "SELECT id, headers FROM outbox_message WHERE id = ANY(%s) AND topic_id <> 0"

# Messages as the relay sent them, in the order of their numbers.
SENT = """
SELECT m.id::text, m.key, m.headers, m.about, m.body, s.lane, s.number, s.sent_at
FROM outbox_message_state s JOIN outbox_message m ON m.id = s.id AND m.created_at = s.created_at
WHERE s.id = ANY(%s) AND m.topic_id <> 0 ORDER BY s.lane, s.number, s.created_at
"""

# Only constants are interpolated.
DELETE_IGNORED = f"DELETE FROM outbox_inbox i WHERE {_IS_IGNORED} AND message_id = ANY(%(ids)s)"  # noqa: S608

RECORD = """
INSERT INTO outbox_operator_act (act, message_id, topic, consumer_group, reason, acted_by)
SELECT %(act)s, id, %(topic)s, %(group)s, %(reason)s, %(by)s FROM unnest(%(ids)s::uuid[]) id
"""

GONE = "Its row is gone: it was pruned, or deleted by hand."
IN_ANOTHER_OUTBOX = "Another project published it: none of the databases here has its outbox."
ON_ITS_WAY = "The relay is sending it again."
NO_GROUP = "This project has no handler in the group."
NO_TOPIC = "The topic is no longer in settings."


class Undelivered(NamedTuple):
    """
    A message that a group has not handled.

    Args:
        outbox: alias of the database that published the message; "" if none of this project's databases did.
        message_id: None for unknown messages; the entry then stands for `messages` numbers of the gap that begins at `number`.
        refused: why the message cannot be delivered again; "" if it can.
    """

    group: str
    outbox: str
    topic: str
    lane: int | None
    number: int | None
    message_id: UUID | None
    type: str = ""
    refused: str = ""
    messages: int = 1


def lost(using: str) -> list[Undelivered]:
    """Return the messages in the open gaps of the groups in a database, at most `LISTED` of each gap."""
    rows: list[Undelivered] = []
    for group, source, topic, lane, first, last in database.raw(using).execute(GAPS).fetchall():
        outbox = _find_outbox(source, using)
        values = {"topic": topic, "lane": lane, "first": first, "last": last, "limit": LISTED}
        numbered = database.raw(outbox).execute(NUMBERED, values).fetchall() if outbox else []
        for number, message_id, headers, state in numbered:
            refused = GONE if headers is None else ON_ITS_WAY if state != State.SENT else _reason_to_refuse(group, topic)
            type_name = read_headers(headers or "").get(Header.TYPE, "")
            rows.append(Undelivered(group, outbox, topic, lane, number, message_id, type_name, refused))
        if (unknown := last - first + 1 - len(numbered)) > 0 and len(numbered) < LISTED:
            refused = GONE if outbox else IN_ANOTHER_OUTBOX
            rows.append(Undelivered(group, outbox, topic, lane, first, None, "", refused, unknown))
    return rows


def _find_outbox(source: str, using: str) -> str:
    """Return the alias of the database with a source id, preferably `using`; "" if no database of this project has it."""
    aliases = dict.fromkeys([using, *database.outbox_databases()])
    return next((alias for alias in aliases if database.raw(alias).execute(SOURCE).fetchone() == (source,)), "")


def _reason_to_refuse(group: str, topic: str) -> str:
    if group not in groups():
        return NO_GROUP
    return "" if topic in conf.settings().topics else NO_TOPIC


def ignored(group: Group, *, since: datetime | None = None) -> list[Undelivered]:
    """Of the newest `LISTED` messages that a group ignored, return those that it has a handler for now."""
    values = {"group": group.name, "since": since, "limit": LISTED}
    rows = database.raw(group.using).execute(IGNORED, values).fetchall()
    undelivered: list[Undelivered] = []
    for source in sorted({row[0] for row in rows}):
        if outbox := _find_outbox(source, group.using):
            location_of = {
                message_id: (topic, lane, number) for outbox, topic, lane, number, message_id in rows if outbox == source
            }
            for message_id, text in database.raw(outbox).execute(HEADERS, [list(location_of)]).fetchall():
                (topic, lane, number), headers = location_of[message_id], read_headers(text)
                type_name = headers.get(Header.TYPE, "")
                if group.find(topic, type_name, headers.get(Header.TAG, "")):
                    undelivered.append(Undelivered(group.name, outbox, topic, lane, number, message_id, type_name))
    return undelivered


def deliver_again(rows: Iterable[Undelivered], *, by: str, reason: str = "") -> int:
    """
    Store messages as deferred messages of their groups, in a transaction per group, outbox and topic; return their number.

    Messages that the group has handled or deferred meanwhile are skipped. Messages that no live process of the group subscribes
    to are ignored again.

    Args:
        by: who does it: a user name, or a command and the user who ran it.
        reason: why, in the operator's words.
    """
    targets: dict[tuple[str, str, str], list[UUID]] = {}
    for row in rows:
        if row.message_id and not row.refused:
            targets.setdefault((row.group, row.outbox, row.topic), []).append(row.message_id)
    return sum(
        _defer(groups()[name], topic, ids, outbox=outbox, by=by, reason=reason) for (name, outbox, topic), ids in targets.items()
    )


def _defer(group: Group, topic: str, ids: Sequence[UUID], *, outbox: str, by: str, reason: str) -> int:
    """Defer messages of a topic in the form in which a relay sends them; return how many are newly deferred."""
    connection = database.raw(outbox)
    [source] = connection.execute(SOURCE).fetchone() or ("",)
    kind = conf.topic_settings(topic).type or TopicType.NORMAL
    deliveries = []
    for message_id, key, headers, about, body, lane, number, sent_at in connection.execute(SENT, [ids]).fetchall():
        # The builder needs a batch, but neither its id nor its attempt, because these messages are not half messages.
        batch = ClaimedBatch(0, 0, topic, kind, lane, number, [message_id])
        sent = OutgoingBuilder(batch, source=source, is_half=False).build(1, key, headers, about, bytes(body))
        deliveries.append(
            Delivery(group.name, sent.topic, sent.message_id, sent.body, "", sent.key, sent.tag, sent.headers, stored_at=sent_at)
        )
    with guarded.atomic(group.using):
        inbox = database.raw(group.using)
        inbox.execute(DELETE_IGNORED, {"group": group.name, "ids": ids})
        unhandled = [
            delivery
            for delivery in deliveries
            if group.find(delivery.topic, delivery.headers.get(Header.TYPE, ""), delivery.tag) is None
        ]
        for_others = subscriptions.ignore(group, unhandled) if unhandled else set()
        still_ignored = {delivery.message_id for index, delivery in enumerate(unhandled) if index not in for_others}
        deferrals = [
            (delivery, Deferral.unhandled(Reason.LOST, delivery))
            for delivery in deliveries
            if delivery.message_id not in still_ignored
        ]
        is_stored = defer(inbox, group.name, deferrals) if deferrals else []
        stored_ids = [delivery.message_id for (delivery, _), is_new in zip(deferrals, is_stored, strict=True) if is_new]
        values = {"act": Act.DELIVERED_AGAIN, "topic": topic, "group": group.name, "reason": reason, "by": by, "ids": stored_ids}
        inbox.execute(RECORD, values)
    return len(stored_ids)
