"""Queries of the embedded broker's tables for the status, the overview, the page of a message and the doctor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from outbox.brokers.base import Delivery, StoredCopy, StoredList
from outbox.database import Connection
from outbox.embedded.half_state import HalfState
from outbox.embedded.halves import ENDABLE_STATES
from outbox.message import TopicSpec, read_headers

PARKED = f"""
SELECT t.name, count(*) FROM outbox_embedded_half h JOIN outbox_embedded_topic t ON t.id = h.topic_id
WHERE h.state = {HalfState.PARKED} GROUP BY 1 ORDER BY 1
"""

GROUPS = "SELECT DISTINCT consumer_group FROM outbox_embedded_offset ORDER BY 1"

COPIES = f"""
SELECT m.message_id, t.name, 'visible', m.half_id::text, m.stored_at, 0, NULL::timestamptz
FROM outbox_embedded_message m JOIN outbox_embedded_topic t ON t.id = m.topic_id WHERE m.message_id = %(id)s
UNION ALL
SELECT h.message_id, t.name,
    CASE h.state WHEN {HalfState.COMMITTED} THEN 'committed' WHEN {HalfState.ROLLED_BACK} THEN 'rolled_back' ELSE 'half' END,
    h.id::text, h.born_at, h.asked, h.ended_at
FROM outbox_embedded_half h JOIN outbox_embedded_topic t ON t.id = h.topic_id
WHERE h.id = ANY(%(halves)s::bigint[]) AND h.message_id = %(id)s
"""

# Queues that have ever had messages, with the last position that each group has read.
QUEUES = """
SELECT t.name, q.topic_id, q.queue, q.last_pos, o.consumer_group, o.pos
FROM outbox_embedded_queue q JOIN outbox_embedded_topic t ON t.id = q.topic_id
LEFT JOIN outbox_embedded_offset o USING (topic_id, queue) ORDER BY t.name, q.queue, o.consumer_group
"""

GROUPS_WITH_DELIVERIES = "SELECT DISTINCT consumer_group FROM outbox_embedded_delivery ORDER BY 1"

# Each query returns a page of messages that are still to be delivered. The pages are ordered by the first column, which an index
# has.
UNREAD = """
SELECT pos, %(group)s::text, %(topic)s::text, message_id, tag, headers, body FROM outbox_embedded_message
WHERE topic_id = %(topic_id)s AND queue = %(queue)s AND pos > %(after)s ORDER BY pos {order} LIMIT %(limit)s
"""
UNFINISHED = """
SELECT d.id, d.consumer_group, t.name, m.message_id, m.tag, m.headers, m.body FROM outbox_embedded_delivery d
JOIN outbox_embedded_message m USING (topic_id, queue, pos) JOIN outbox_embedded_topic t ON t.id = d.topic_id
WHERE d.consumer_group = %(group)s AND d.id > %(after)s
ORDER BY d.id {order} LIMIT %(limit)s
"""
HALVES = f"""
SELECT h.id, '', t.name, h.message_id, h.tag, h.headers, h.body FROM outbox_embedded_half h
JOIN outbox_embedded_topic t ON t.id = h.topic_id WHERE h.state IN {ENDABLE_STATES} AND h.id > %(after)s
ORDER BY h.id {{order}} LIMIT %(limit)s
"""


def read_status(connection: Connection) -> tuple[dict[str, int], list[str]]:
    """Return the parked half messages and the consumer groups in a database."""
    parked: dict[str, int] = dict(connection.execute(PARKED).fetchall())
    return parked, [group for (group,) in connection.execute(GROUPS).fetchall()]


def read_copies(connection: Connection, message_id: str, half_ids: Sequence[str]) -> list[StoredCopy]:
    """Return the copies of a message, and of its half messages by their ids."""
    valid_ids = [half_id for half_id in half_ids if half_id.isascii() and half_id.isdecimal() and len(half_id) < 19]
    rows = connection.execute(COPIES, {"id": message_id, "halves": valid_ids}).fetchall()
    return [StoredCopy(*row) for row in rows]


def list_stored(connection: Connection, topics: Sequence[TopicSpec], *, reads_from_first: bool) -> list[StoredList]:
    """
    Return lists of the messages that are still to be delivered to each group, and of half messages that may still be committed.

    Args:
        reads_from_first: whether groups that have not read a topic yet begin at its first message, not after the last.
    """
    expected = {topic.name: topic.groups for topic in topics} if reads_from_first else {}
    queues: dict[tuple[str, int, int, int], dict[str, int]] = {}
    for name, topic_id, queue, last_pos, group, pos in connection.execute(QUEUES).fetchall():
        offsets = queues.setdefault((name, topic_id, queue, last_pos), dict.fromkeys(expected.get(name, ()), 0))
        offsets.update({} if group is None else {group: pos})
    lists = [
        _stored_list(connection, "unread message", UNREAD, pos, topic=name, topic_id=topic_id, queue=queue, group=group)
        for (name, topic_id, queue, last_pos), offsets in queues.items()
        for group, pos in sorted(offsets.items())
        if pos < last_pos
    ]
    for (group,) in connection.execute(GROUPS_WITH_DELIVERIES).fetchall():
        lists.append(_stored_list(connection, "unfinished message", UNFINISHED, 0, group=group))
    lists.append(_stored_list(connection, "half message", HALVES, 0))
    return lists


def _stored_list(connection: Connection, noun: str, query: str, first: int, **arguments: object) -> StoredList:
    return noun, partial(_read_page, connection, query, first, arguments)


def _read_page(
    connection: Connection, query: str, first: int, arguments: Mapping[str, object], after: Any, limit: int, newest: bool
) -> list[tuple[Any, Delivery | None]]:
    parameters = {**arguments, "after": first if after is None else after, "limit": limit}
    rows = connection.execute(query.format(order="DESC" if newest else "ASC"), parameters).fetchall()
    return [
        (key, Delivery(group, topic, message_id, bytes(body), receipt="", tag=tag, headers=read_headers(headers)))
        for key, group, topic, message_id, tag, headers, body in rows
    ]
