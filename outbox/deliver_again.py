"""
Deliver messages to one group again: messages that were lost on the way, and messages that the group ignored.

The number of a lost message is in an open gap of the group. An ignored message has an inbox row, although no live process of the
group had a handler for it. The outbox that published these messages still has their rows, until they are pruned. From the rows,
this module stores the messages as deferred messages of the group, so that its consumers handle them. If the broker still delivers
one of the messages, the copy is dropped. Source: docs/explanation/deliveries.md.
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

LISTED = 1000  # maximum number of messages that are listed for a gap, or as ignored by a group

SOURCE = "SELECT id FROM outbox_source"

GAPS = """
SELECT consumer_group, source, topic, lane, first_number, last_number FROM outbox_gap
WHERE closed_at IS NULL ORDER BY consumer_group, topic, source, lane, first_number
"""

# The messages with the numbers of a gap: their headers, which are NULL if the message row is gone, and the state of their batch.
NUMBERED = """
SELECT b.first_seq + u.n - 1, u.id, m.headers, b.state
FROM outbox_topic t JOIN outbox_batch b ON b.topic_id = t.id AND b.lane = %(lane)s
    AND b.first_seq <= %(last)s AND b.first_seq + cardinality(b.message_ids) > %(first)s
CROSS JOIN unnest(b.message_ids) WITH ORDINALITY u (id, n)
LEFT JOIN outbox_message m ON m.id = u.id AND m.topic_id <> 0
WHERE t.name = %(topic)s AND u.n <> ALL (b.split) AND b.first_seq + u.n - 1 BETWEEN %(first)s AND %(last)s
ORDER BY 1 LIMIT %(limit)s
"""

# An inbox row with delivery_count 0 is of an ignored message, or of one that an operator discarded.
_IS_IGNORED = """consumer_group = %(group)s AND delivery_count = 0 AND NOT EXISTS (
    SELECT FROM outbox_operator_act a
    WHERE a.message_id = i.message_id AND a.consumer_group = i.consumer_group AND a.act = 'discarded')"""

IGNORED = f"""
SELECT source, topic, lane, number, message_id FROM outbox_inbox i
WHERE {_IS_IGNORED} AND (%(since)s::timestamptz IS NULL OR handled_at >= %(since)s)
ORDER BY handled_at DESC LIMIT %(limit)s
"""  # noqa: S608  (only constants are interpolated)

HEADERS = "SELECT id, headers FROM outbox_message WHERE id = ANY(%s) AND topic_id <> 0"

# The data that the relay sent of each message, in the order of lanes and numbers.
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
    A message that a group has not handled, or several messages of a gap that are unknown.

    Args:
        outbox: alias of the database whose outbox published the message; "" if no database of this project has that outbox.
        message_id: None if the messages are unknown. Then the entry stands for `messages` numbers of a gap that begin at
            `number`.
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
    """Return the messages in the open gaps of all groups of a database, at most `LISTED` of each gap."""
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
    """Return the alias of a database whose outbox has a source id, preferably `using`; "" if this project has none."""
    aliases = dict.fromkeys([using, *database.outbox_databases()])
    return next((alias for alias in aliases if database.raw(alias).execute(SOURCE).fetchone() == (source,)), "")


def _reason_to_refuse(group: str, topic: str) -> str:
    if group not in groups():
        return NO_GROUP
    return "" if topic in conf.settings().topics else NO_TOPIC


def ignored(group: Group, *, since: datetime | None = None) -> list[Undelivered]:
    """Return those of the newest `LISTED` messages that a group ignored, for which this process has a handler now."""
    values = {"group": group.name, "since": since, "limit": LISTED}
    rows = database.raw(group.using).execute(IGNORED, values).fetchall()
    undelivered: list[Undelivered] = []
    for source in sorted({row[0] for row in rows}):
        if outbox := _find_outbox(source, group.using):
            numbering = {
                message_id: (topic, lane, number) for row_source, topic, lane, number, message_id in rows if row_source == source
            }
            for message_id, text in database.raw(outbox).execute(HEADERS, [list(numbering)]).fetchall():
                (topic, lane, number), headers = numbering[message_id], read_headers(text)
                type_name = headers.get(Header.TYPE, "")
                if group.find(topic, type_name, headers.get(Header.TAG, "")):
                    undelivered.append(Undelivered(group.name, outbox, topic, lane, number, message_id, type_name))
    return undelivered


def deliver_again(rows: Iterable[Undelivered], *, by: str, reason: str = "") -> int:
    """
    Store messages as deferred messages of their groups, in a transaction per group, outbox and topic; return how many are new.

    Unknown and refused messages are skipped, as are those that the group has handled or deferred meanwhile. Messages that no live
    process of the group subscribes to are ignored again.

    Args:
        by: who does it: a user name, or a command and the user who ran it.
        reason: why, in the operator's words.
    """
    ids_by_target: dict[tuple[str, str, str], list[UUID]] = {}
    for row in rows:
        if row.message_id and not row.refused:
            ids_by_target.setdefault((row.group, row.outbox, row.topic), []).append(row.message_id)
    return sum(
        _defer(groups()[name], topic, ids, outbox=outbox, by=by, reason=reason)
        for (name, outbox, topic), ids in ids_by_target.items()
    )


def _defer(group: Group, topic: str, ids: Sequence[UUID], *, outbox: str, by: str, reason: str) -> int:
    """Store messages of a topic as deferred messages, in the form in which a relay sends them; return how many were stored."""
    connection = database.raw(outbox)
    [source] = connection.execute(SOURCE).fetchone() or ("",)
    kind = conf.topic_settings(topic).type or TopicType.NORMAL
    deliveries = []
    for message_id, key, headers, about, body, lane, number, sent_at in connection.execute(SENT, [ids]).fetchall():
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
        done = [delivery.message_id for (delivery, _), is_new in zip(deferrals, is_stored, strict=True) if is_new]
        values = {"act": Act.DELIVERED_AGAIN, "topic": topic, "group": group.name, "reason": reason, "by": by, "ids": done}
        inbox.execute(RECORD, values)
    return len(done)
