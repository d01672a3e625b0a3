"""
Gaps: numbers of a lane that have not reached a group, although later numbers reached it longer ago than the settle time.

A relay numbers the messages of its lane without gaps per (source, topic, lane). Each delivery leaves its number in the inbox, or
in the table of deferred messages. A number in neither table was lost, with two exceptions. First, the outbox may explain why the
number is missing: its message is not sent yet, was rejected, or was discarded by an operator. This is looked up only if the
outbox is in the same database as the inbox. Second, the broker may still deliver the message to the group: while a backlog is
worked off, an unordered message may arrive long after a later one.

A gap is closed when its numbers have arrived or are explained. If numbers after the last one that arrived are lost, no gap shows
it; only the audit of the full history finds them.
"""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections
from django.db.backends.utils import CursorWrapper

from outbox import conf, signals
from outbox.brokers.capabilities import Receives
from outbox.consuming.register import Group
from outbox.database import guarded
from outbox.database.locks import Lock
from outbox.errors import BrokerUnavailable
from outbox.ids import first_id_at
from outbox.logs import get_logger, log_fields
from outbox.message import TopicType

logger = get_logger(__name__)

MAX_NUMBERS = 100_000
"""How many of the last numbers of a lane are checked. Only the audit finds gaps before them."""

# Only one process of a group looks for gaps at a time.
LOCK = f"SELECT pg_try_advisory_xact_lock({Lock.GAPS}, hashtext(%s))"

# PostgreSQL's JIT compiler would take longer to compile FIND than it takes to run it.
NO_JIT = "SET LOCAL jit = off"

# Find a group's gaps and record them in outbox_gap; return those that are new or have changed.
#
# `hole`: numbers that are missing between two neighbours among the last numbers of a lane in the inbox, if the later neighbour
# arrived longer ago than the settle time, and the earlier one is younger than the retention (otherwise inbox rows may have been
# pruned). `piece`: the parts of holes, and of gaps that are open already, whose numbers are in no table, and not explained by the
# outbox. `missing`: the pieces that are not within a larger one. Open gaps that no longer begin with a missing number are closed.
FIND = """
WITH RECURSIVE lane_of AS (
    (SELECT topic, source, lane FROM outbox_inbox WHERE consumer_group = %(group)s AND number IS NOT NULL
     ORDER BY topic, source, lane LIMIT 1)
    UNION ALL
    SELECT n.* FROM lane_of l, LATERAL (
        SELECT topic, source, lane FROM outbox_inbox WHERE consumer_group = %(group)s AND number IS NOT NULL
        AND (topic, source, lane) > (l.topic, l.source, l.lane) ORDER BY topic, source, lane LIMIT 1
    ) n
), hole AS (
    SELECT l.topic, l.source, l.lane, h.first, h.last
    FROM lane_of l, LATERAL (
        SELECT lead(number) OVER w + 1 AS first, number - 1 AS last, handled_at, lead(message_id) OVER w AS message_before
        FROM (
            SELECT number, message_id, handled_at FROM outbox_inbox
            WHERE consumer_group = %(group)s AND topic = l.topic AND source = l.source AND lane = l.lane
              AND number IS NOT NULL ORDER BY number DESC LIMIT %(recent)s
        ) r
        WINDOW w AS (ORDER BY number DESC)
    ) h
    WHERE l.topic = ANY (%(topics)s) AND h.first <= h.last
      AND h.handled_at < clock_timestamp() - %(settle)s AND h.message_before >= %(oldest)s
), suspect AS (
    SELECT * FROM hole
    UNION
    SELECT topic, source, lane, first_number, last_number FROM outbox_gap
    WHERE consumer_group = %(group)s AND closed_at IS NULL
), piece AS (
    SELECT DISTINCT g.topic, g.source, g.lane, m.first, m.last
    FROM suspect g, LATERAL (
        SELECT lag(number) OVER (ORDER BY number) + 1 AS first, number - 1 AS last
        FROM (
            SELECT g.first - 1 AS number
            UNION SELECT g.last + 1
            UNION
            SELECT number FROM outbox_inbox
            WHERE consumer_group = %(group)s AND topic = g.topic AND source = g.source AND lane = g.lane
              AND number BETWEEN g.first AND g.last
            UNION
            SELECT number FROM outbox_deferred
            WHERE consumer_group = %(group)s AND topic = g.topic AND source = g.source AND lane = g.lane
              AND number BETWEEN g.first AND g.last
            UNION
            SELECT b.first_seq + p.position - 1
            FROM outbox_source s
            JOIN outbox_topic t ON t.name = g.topic
            JOIN outbox_batch b ON b.topic_id = t.id AND b.lane = g.lane AND b.state <> 3 -- not SENT
             AND b.first_seq <= g.last AND b.first_seq + cardinality(b.message_ids) > g.first
            CROSS JOIN generate_series(1, cardinality(b.message_ids)) p (position)
            WHERE s.id = g.source AND p.position <> ALL (b.split)
            UNION
            SELECT d.number FROM outbox_source s JOIN outbox_dead d ON d.topic = g.topic AND d.lane = g.lane
            WHERE s.id = g.source AND d.number BETWEEN g.first AND g.last
        ) k
        WHERE number BETWEEN g.first - 1 AND g.last + 1
    ) m
    WHERE m.first <= m.last
), missing AS (
    SELECT * FROM piece p WHERE NOT EXISTS (
        SELECT FROM piece o WHERE (o.topic, o.source, o.lane) = (p.topic, p.source, p.lane)
        AND o.first <= p.first AND o.last >= p.last AND (o.first, o.last) <> (p.first, p.last)
    )
), closed AS (
    UPDATE outbox_gap g SET closed_at = clock_timestamp()
    WHERE g.consumer_group = %(group)s AND g.closed_at IS NULL AND NOT EXISTS (
        SELECT FROM missing m
        WHERE (m.topic, m.source, m.lane, m.first) = (g.topic, g.source, g.lane, g.first_number)
    )
)
INSERT INTO outbox_gap AS g (consumer_group, source, topic, lane, first_number, last_number)
SELECT %(group)s, source, topic, lane, first, last FROM missing
ON CONFLICT (consumer_group, source, topic, lane, first_number) DO UPDATE SET last_number = excluded.last_number,
    found_at = CASE WHEN g.closed_at IS NULL THEN g.found_at ELSE clock_timestamp() END, closed_at = NULL
WHERE g.last_number <> excluded.last_number OR g.closed_at IS NOT NULL
RETURNING topic, source, lane, first_number, last_number
"""

# The ids of the messages that have the numbers of a gap, if the outbox is in this database.
IDS = """
SELECT m.id FROM outbox_source s JOIN outbox_topic t ON t.name = %(topic)s
JOIN outbox_batch b ON b.topic_id = t.id AND b.lane = %(lane)s
  AND b.first_seq <= %(last)s AND b.first_seq + cardinality(b.message_ids) > %(first)s
CROSS JOIN unnest(b.message_ids) WITH ORDINALITY m (id, position)
WHERE s.id = %(source)s AND b.first_seq + m.position - 1 BETWEEN %(first)s AND %(last)s LIMIT %(limit)s
"""

MAX_LOOKED_UP = 100  # the broker is asked about at most this number of messages of a gap

# Whether the number after a gap arrived within RECENTLY. Then the missing numbers may still arrive.
ARRIVED_RECENTLY = """
SELECT EXISTS (
    SELECT FROM outbox_inbox WHERE consumer_group = %(group)s AND topic = %(topic)s AND source = %(source)s AND lane = %(lane)s
    AND number = %(last)s + 1 AND handled_at > clock_timestamp() - %(recently)s)
"""

RECENTLY = timedelta(hours=1)

# Delete the row of a gap whose messages may still be delivered; if they are not, FIND finds the gap again.
DELETE_GAP = """
DELETE FROM outbox_gap WHERE consumer_group = %(group)s AND source = %(source)s AND topic = %(topic)s AND lane = %(lane)s
AND first_number = %(first)s
"""


Missing = dict[str, Any]
"""A gap: the numbers `first` to `last` of a lane, in a dict that also has the keys `topic`, `source` and `lane`."""


def watched_topics(group: Group) -> list[str]:
    """Return a group's topics except those of type delay, where a missing number only means that its message is delayed."""
    return [topic for topic in group.topics if conf.topic_settings(topic).type is not TopicType.DELAY]


def find_gaps(group: Group) -> list[Missing]:
    """
    Find a group's gaps, record the new, changed and closed ones, and report the new and changed ones.

    Returns:
        Gaps that are new or have changed. If another process is looking for the group's gaps at the same time, an empty list.
    """
    settings = conf.settings()
    values: dict[str, Any] = {
        "group": group.name,
        "topics": watched_topics(group),
        "settle": settings.consumer.settle,
        "oldest": first_id_at(datetime.now(UTC) - settings.retention),
        "recent": MAX_NUMBERS,
    }
    with guarded.atomic(group.using), connections[group.using].cursor() as cursor:
        cursor.execute(LOCK, [group.name])
        if not cursor.fetchone()[0]:
            return []
        cursor.execute(NO_JIT)
        cursor.execute(FIND, values)
        gaps = [dict(zip(("topic", "source", "lane", "first", "last"), row, strict=True)) for row in cursor.fetchall()]
        deliverable = _still_deliverable(group, gaps, cursor)
        for gap in deliverable:
            cursor.execute(DELETE_GAP, {"group": group.name, **gap})
    gaps = [gap for gap in gaps if gap not in deliverable]
    for gap in gaps:
        _report(group, gap)
    return gaps


def _still_deliverable(group: Group, gaps: list[Missing], cursor: CursorWrapper) -> list[Missing]:
    """
    Return the gaps whose messages the broker may still deliver to the group.

    Some brokers cannot tell whether they may deliver a certain message again. Then messages of a gap count as deliverable while
    at least as many messages of the topic wait for the group as are missing, but only in the first hour, since in a busy group
    some messages always wait. If a broker is unavailable, gaps in its topics count as deliverable in the first hour, too.
    """
    by_broker: dict[str, list[Missing]] = {}
    for gap in gaps:
        if topic := conf.settings().topics.get(gap["topic"]):
            by_broker.setdefault(topic.broker, []).append(gap)
    deliverable: list[Missing] = []
    for alias, gaps_of_broker in by_broker.items():
        try:
            with closing(Receives.of(conf.make_broker(alias))) as broker:
                deliverable += [gap for gap in gaps_of_broker if _is_deliverable(broker, group, gap, cursor)]
        except BrokerUnavailable:
            deliverable += [gap for gap in gaps_of_broker if _arrived_recently(group, gap, cursor)]
    return deliverable


def _is_deliverable(broker: Receives, group: Group, gap: Missing, cursor: CursorWrapper) -> bool:
    cursor.execute(IDS, {"limit": MAX_LOOKED_UP, **gap})
    ids = [str(row[0]) for row in cursor.fetchall()]
    if ids and broker.may_deliver_again(group.name, ids):
        return True
    if broker.limits(broker.options, broker.topics[gap["topic"]]).redelivery == timedelta():
        return False  # this broker's `may_deliver_again` finds every message that may be delivered again
    waiting = broker.backlog(group.name).waiting.get(gap["topic"], 0)
    return waiting > gap["last"] - gap["first"] and _arrived_recently(group, gap, cursor)


def _arrived_recently(group: Group, gap: Missing, cursor: CursorWrapper) -> bool:
    cursor.execute(ARRIVED_RECENTLY, gap | {"group": group.name, "recently": RECENTLY})
    return bool(cursor.fetchone()[0])


def _report(group: Group, gap: Missing) -> None:
    logger.error(
        "Group %r has not received the numbers %s to %s of lane %s in topic %r (source %s). They are lost or very late.",
        *(group.name, *(gap[name] for name in ("first", "last", "lane", "topic", "source"))),
        extra=log_fields(group=group.name, topic=gap["topic"], lane=gap["lane"]),
    )
    signals.gap_found.send_robust(sender=find_gaps, group=group.name, **gap)
