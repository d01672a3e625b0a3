"""
Gaps: numbers of a lane that have not reached a group, although later ones did longer ago than the settle time.

A relay numbers messages gap-free per (source, topic, lane). Each delivery leaves its number in the inbox, or among the deferred
messages. A number in neither table was lost, unless the outbox explains it: its message is not sent yet, was rejected, or was
discarded by an operator. This is looked up where the outbox is in the same database as the
inbox. A number is not lost either while the broker still has its message for the group: without keys, a later message may arrive
long before an earlier one while a backlog is worked off.

A gap is closed when its numbers have arrived or were explained. Numbers after the last one that arrived are not a gap yet; the
audit of the full history finds those.
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

RECENT = 100_000
"""The number of a lane's last numbers that are checked. More than that within the settle time is left to the audit."""

# Only one process of a group looks for gaps at a time.
LOOK_ALONE = f"SELECT pg_try_advisory_xact_lock({Lock.GAPS}, hashtext(%s))"

# Compiling the statement takes longer than it runs.
NO_JIT = "SET LOCAL jit = off"

# Each lane's last numbers, last first, as the index has them: numbers missing between two neighbours are a hole. The
# holes, and the gaps known before, without the numbers that are known, are the gaps now; of two that overlap, the larger
# one counts.
#
# Before a message older than the retention, inbox rows may have been pruned: a number missing there is no sign of a loss.
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

# The messages that have numbers of a lane, where the outbox is in this database.
IDS = """
SELECT m.id FROM outbox_source s JOIN outbox_topic t ON t.name = %(topic)s
JOIN outbox_batch b ON b.topic_id = t.id AND b.lane = %(lane)s
  AND b.first_seq <= %(last)s AND b.first_seq + cardinality(b.message_ids) > %(first)s
CROSS JOIN unnest(b.message_ids) WITH ORDINALITY m (id, position)
WHERE s.id = %(source)s AND b.first_seq + m.position - 1 BETWEEN %(first)s AND %(last)s LIMIT %(limit)s
"""

LOOKED_UP = 100  # messages of a gap about which the broker is asked

# Whether the number after a gap arrived so recently that the missing ones may still arrive.
CAME_LATELY = """
SELECT EXISTS (
    SELECT FROM outbox_inbox WHERE consumer_group = %(group)s AND topic = %(topic)s AND source = %(source)s AND lane = %(lane)s
    AND number = %(last)s + 1 AND handled_at > clock_timestamp() - %(lately)s)
"""

LATELY = timedelta(hours=1)

NOT_YET = """
DELETE FROM outbox_gap WHERE consumer_group = %(group)s AND source = %(source)s AND topic = %(topic)s AND lane = %(lane)s
AND first_number = %(first)s
"""


Missing = dict[str, Any]
"""Numbers of a lane that have not arrived: `topic`, `source` and `lane`, `first` to `last`."""


def watched_topics(group: Group) -> list[str]:
    """Return the topics whose numbers arrive without gaps: all but those of type delay, where messages arrive out of order."""
    return [topic for topic in group.topics if conf.topic_settings(topic).type is not TopicType.DELAY]


def find_gaps(group: Group) -> list[Missing]:
    """
    Find a group's gaps, and record the new, changed and closed ones.

    Returns:
        Gaps that are new or have changed. Also empty while another process looks for them.
    """
    settings = conf.settings()
    values: dict[str, Any] = {
        "group": group.name,
        "topics": watched_topics(group),
        "settle": settings.consumer.settle,
        "oldest": first_id_at(datetime.now(UTC) - settings.retention),
        "recent": RECENT,
    }
    with guarded.atomic(group.using), connections[group.using].cursor() as cursor:
        cursor.execute(LOOK_ALONE, [group.name])
        if not cursor.fetchone()[0]:
            return []
        cursor.execute(NO_JIT)
        cursor.execute(FIND, values)
        numbers = [dict(zip(("topic", "source", "lane", "first", "last"), row, strict=True)) for row in cursor.fetchall()]
        awaited = _still_at_the_broker(group, numbers, cursor)
        for missing in awaited:
            cursor.execute(NOT_YET, {"group": group.name, **missing})
    numbers = [missing for missing in numbers if missing not in awaited]
    for missing in numbers:
        _announce(group, missing)
    return numbers


def _still_at_the_broker(group: Group, found: list[Missing], cursor: CursorWrapper) -> list[Missing]:
    """
    Return those whose messages the group has before it.

    A broker that cannot tell of a message is asked how much waits. While that is as much as is missing, it may be that, for an
    hour: in a busy group something always waits. So with a broker that cannot be asked.
    """
    by_broker: dict[str, list[Missing]] = {}
    for missing in found:
        if topic := conf.settings().topics.get(missing["topic"]):
            by_broker.setdefault(topic.broker, []).append(missing)
    awaited: list[Missing] = []
    for alias, mine in by_broker.items():
        try:
            with closing(Receives.of(conf.make_broker(alias))) as broker:
                awaited += [missing for missing in mine if _is_before(broker, group, missing, cursor)]
        except BrokerUnavailable:
            awaited += [missing for missing in mine if _came_lately(group, missing, cursor)]
    return awaited


def _is_before(broker: Receives, group: Group, missing: Missing, cursor: CursorWrapper) -> bool:
    cursor.execute(IDS, {"limit": LOOKED_UP, **missing})
    ids = [str(row[0]) for row in cursor.fetchall()]
    if ids and broker.may_deliver_again(group.name, ids):
        return True
    if broker.limits(broker.options, broker.topics[missing["topic"]]).redelivery == timedelta():
        return False  # it knows all that it may deliver again
    waiting = broker.backlog(group.name).waiting.get(missing["topic"], 0)
    return waiting > missing["last"] - missing["first"] and _came_lately(group, missing, cursor)


def _came_lately(group: Group, missing: Missing, cursor: CursorWrapper) -> bool:
    cursor.execute(CAME_LATELY, missing | {"group": group.name, "lately": LATELY})
    return bool(cursor.fetchone()[0])


def _announce(group: Group, missing: Missing) -> None:
    logger.error(
        "Group %r misses the numbers %s to %s of lane %s in topic %r (source %s): lost on the way, or very late.",
        *(group.name, *(missing[name] for name in ("first", "last", "lane", "topic", "source"))),
        extra=log_fields(group=group.name, topic=missing["topic"], lane=missing["lane"]),
    )
    signals.gap_found.send_robust(sender=find_gaps, group=group.name, **missing)
