"""What is told by ids, not by numbers: messages without a number or a place, business rows, and the order of keys."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import (
    NO_MESSAGE,
    NO_ROW,
    NO_TOPIC,
    NOT_SENT,
    ROW_GONE,
    SEVERAL_PLACES,
    STRANDED,
    Breach,
    FindingKind,
    Stage,
    unknown_topic,
)
from tests.outbox.pipeline.sql.frames import Check

STILL_TO_COME = "their times are still to come: a clock is ahead, or was"

# What can be said of each message without a number; then each rule that it breaks.
UNNUMBERED = """
WITH said AS (
    SELECT message_id, topic, source, CASE
        WHEN state = 'sent' THEN CASE WHEN coalesce(at <= %(cutoff)s, true) THEN 'sent' ELSE 'sent young' END
        WHEN state IN ('dead', 'discarded') THEN 'gone'
        ELSE CASE WHEN coalesce(at <= %(cutoff)s, true) THEN 'late' ELSE 'open' END END AS word
    FROM quick_places WHERE number IS NULL
    UNION ALL
    SELECT message_id, topic, source, CASE WHEN at <= %(cutoff)s THEN 'stored' ELSE 'stored young' END
    FROM quick_broker WHERE number IS NULL
    UNION ALL
    SELECT message_id, topic, source, 'in ' || consumer_group FROM quick_inbox WHERE number IS NULL
    UNION ALL
    SELECT message_id, topic, source,
        CASE WHEN outcome IN ('waiting', 'deferred') THEN 'waits in ' ELSE 'dead in ' END || consumer_group
    FROM quick_failed_deliveries WHERE number IS NULL AND outcome IN ('waiting', 'deferred', 'dead', 'discarded')
), seen AS (
    SELECT message_id, topic, array_agg(word) AS words, topic = ANY(%(seen_topics)s::text[]) AS is_seen,
        bool_or(word IN ('sent', 'sent young', 'gone', 'late', 'open')) AS is_placed,
        bool_or(word IN ('stored', 'stored young')) AS is_stored, bool_or(word LIKE 'in %%') AS is_arrived
    FROM said WHERE source = ANY(%(sources)s::text[]) AND message_id COLLATE "C" >= %(first_id)s GROUP BY message_id, topic
), wrong AS (
    SELECT s.topic, s.message_id, v.kind, v.stage, v.grp, v.detail FROM seen s CROSS JOIN LATERAL (
        SELECT 'late', 'outbox', '', %(not_sent)s::text WHERE 'late' = ANY(words) AND NOT is_stored
        UNION ALL SELECT 'lost', 'broker', '', '' WHERE is_seen AND 'sent' = ANY(words) AND NOT is_stored
        UNION ALL SELECT 'orphan', 'broker', '', '' WHERE is_stored AND NOT is_placed
        UNION ALL SELECT 'orphan', 'inbox', '', '' WHERE is_arrived AND NOT is_stored AND NOT is_placed
        UNION ALL SELECT CASE WHEN 'waits in ' || g.name = ANY(words) THEN 'late' ELSE 'lost' END, 'inbox', g.name, ''
            FROM quick_groups g WHERE g.topic = s.topic
            AND CASE WHEN is_seen THEN 'stored' = ANY(words) ELSE 'sent' = ANY(words) END
            AND NOT words && ARRAY['in ' || g.name, 'dead in ' || g.name]
    ) v(kind, stage, grp, detail)
)
SELECT topic, kind, stage, detail, grp, count(*), (array_agg(message_id ORDER BY message_id COLLATE "C"))[:%(ids)s]
FROM wrong GROUP BY 1, 2, 3, 4, 5
"""

# Message rows against the places that name them.
PLACES = """
WITH m AS (
    SELECT message_id, min(topic) AS topic, count(*) AS n FROM quick_messages
    WHERE message_id COLLATE "C" >= %(first_id)s GROUP BY 1
), p AS (
    SELECT message_id, min(topic) AS topic, count(*) AS n FROM quick_places
    WHERE message_id COLLATE "C" >= %(first_id)s GROUP BY 1
), wrong AS (
    SELECT least(m.topic, p.topic) AS topic, message_id,
        CASE WHEN p.n IS NULL THEN %(stranded)s WHEN m.n IS NULL THEN %(row_gone)s ELSE %(several)s END AS detail
    FROM m FULL JOIN p USING (message_id) WHERE m.n IS DISTINCT FROM p.n
)
SELECT topic, detail, count(*), (array_agg(message_id ORDER BY message_id COLLATE "C"))[:%(ids)s] FROM wrong GROUP BY 1, 2
"""

# Business rows against the messages about them. Of a pair on the window's border one may lie before it.
BUSINESS = """
WITH told AS (
    SELECT e.name AS subject, m.about, m.at FROM quick_messages m CROSS JOIN LATERAL (
        SELECT name FROM quick_entries e WHERE e.topic = m.topic AND starts_with(m.about, e.about || ':')
        AND (e.type = '' OR e.type = m.type) ORDER BY nth LIMIT 1) e
    WHERE m.message_id COLLATE "C" >= %(first_id)s
), owed AS (
    SELECT subject, about, at FROM quick_business
    WHERE subject IN (SELECT name FROM quick_entries) AND (%(since)s::timestamptz IS NULL OR at >= %(since)s)
), pairs AS (
    SELECT subject, about, sum(n)::bigint AS rows, sum(1 - n)::bigint AS messages, max(at) AS at
    FROM (SELECT *, 1 AS n FROM owed UNION ALL SELECT *, 0 FROM told) a GROUP BY 1, 2
)
SELECT subject, CASE WHEN rows = 0 THEN 'orphan' WHEN messages = 0 THEN 'lost' ELSE 'duplicated' END AS kind,
    CASE WHEN rows = 0 THEN %(no_row)s WHEN messages = 0 THEN %(no_message)s
        ELSE messages || ' messages for ' || rows || ' rows' END,
    count(*), (array_agg(about ORDER BY about COLLATE "C"))[:%(ids)s]
FROM pairs WHERE rows <> messages AND (%(border)s::timestamptz IS NULL OR at >= %(border)s) GROUP BY 1, 2, 3
"""

# In ordered topics: what comes behind a higher number of its key. At the broker, by position, and by generation and
# position: places of a key that began anew say nothing of those before.
ORDER = """
WITH places AS (
    SELECT *, coalesce((queue <> lag(queue) OVER w OR pos < lag(pos) OVER w)
        AND at > lag(at) OVER w + make_interval(secs => %(tolerance)s), false)::int AS is_anew
    FROM quick_broker WHERE topic = ANY(%(ordered_topics)s::text[]) AND number IS NOT NULL
    WINDOW w AS (PARTITION BY topic, source, lane, key ORDER BY at NULLS FIRST, queue, pos)
), generations AS (
    SELECT *, sum(is_anew) OVER (PARTITION BY topic, source, lane, key ORDER BY at NULLS FIRST, queue, pos
        ROWS UNBOUNDED PRECEDING) AS generation
    FROM places
), stored AS (
    SELECT 'broker' AS stage, '' AS grp, topic, source, lane, key, number, message_id,
        max(number) OVER (PARTITION BY topic, source, lane, key ORDER BY queue, pos
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before,
        max(number) OVER (PARTITION BY topic, source, lane, key ORDER BY generation, queue, pos
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_in_time
    FROM generations
), handled AS (
    SELECT 'inbox', i.consumer_group, i.topic, i.source, i.lane, m.key, i.number, i.message_id,
        max(i.number) OVER (PARTITION BY i.consumer_group, i.topic, i.source, i.lane, m.key ORDER BY i.at, i.number
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM quick_inbox i JOIN quick_messages m USING (message_id)
    WHERE i.topic = ANY(%(ordered_topics)s::text[]) AND i.number IS NOT NULL AND m.topic = ANY(%(ordered_topics)s::text[])
)
SELECT stage, grp, topic, source, lane, key, number, message_id, before FROM (
    SELECT * FROM stored UNION ALL SELECT *, before FROM handled
) a WHERE before > number AND before_in_time > number
"""


# Topics that messages or their places name and that do not exist.
TOPICS = """
SELECT topic, count(*), (array_agg(message_id ORDER BY message_id COLLATE "C"))[:%(ids)s] FROM (
    SELECT topic, message_id FROM quick_messages UNION SELECT topic, message_id FROM quick_places) m
WHERE starts_with(topic, %(no_topic)s) GROUP BY 1 ORDER BY 1
"""


# Times that are still to come.
FUTURE = """
SELECT stage, topic, grp, count(*), (array_agg(message_id ORDER BY message_id COLLATE "C"))[:%(ids)s] FROM (
    SELECT 'outbox' AS stage, topic, '' AS grp, message_id, at FROM quick_places WHERE state <> 'delayed'
    UNION ALL SELECT 'broker', topic, '', message_id, at FROM quick_broker
    UNION ALL SELECT 'inbox', topic, consumer_group, message_id, at FROM quick_inbox
) r WHERE at > clock_timestamp() + make_interval(secs => %(tolerance)s) GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""


def judge_ids(
    check: Check,
    config: PipelineConfig,
    *,
    cutoff: datetime,
    sources: Sequence[str],
    since: datetime | None,
    border: timedelta,
    first_id: str,
) -> list[Breach]:
    """
    Hold what has no number to each other by id.

    Args:
        since: business rows older than that are not judged; None: all are.
        border: nor are those that little younger.
        first_id: nor are messages with smaller ids.
    """
    arguments = {"cutoff": cutoff, "sources": list(sources), "seen_topics": list(config.seen_topics)}
    arguments |= {"first_id": first_id, "ids": config.ids_per_finding, "not_sent": NOT_SENT}
    arguments |= {"stranded": STRANDED, "row_gone": ROW_GONE, "several": SEVERAL_PLACES}
    arguments |= {"no_row": NO_ROW, "no_message": NO_MESSAGE, "since": since, "border": since and since + border}
    arguments |= {"no_topic": NO_TOPIC}
    arguments |= {"ordered_topics": list(config.ordered_topics), "tolerance": config.clock_tolerance_seconds}
    topics = {entry.name: entry.topic for entry in config.business}
    return [
        *(_unnumbered(*row) for row in check.run(UNNUMBERED, arguments).fetchall()),
        *(_place(*row) for row in check.run(PLACES, arguments).fetchall()),
        *(_business(topics, *row) for row in check.run(BUSINESS, arguments).fetchall()),
        *(unknown_topic(*row) for row in check.run(TOPICS, arguments).fetchall()),
        *(_ahead(*row) for row in check.run(FUTURE, arguments).fetchall()),
        *(_late(*row) for row in check.run(ORDER, arguments).fetchall()),
    ]


def _unnumbered(topic: str, kind: str, stage: str, detail: str, group: str, count: int, ids: list[str]) -> Breach:
    return Breach(FindingKind(kind), Stage(stage), topic, group=group, count=count, detail=detail, ids=tuple(ids))


def _place(topic: str, detail: str, count: int, ids: list[str]) -> Breach:
    kind = FindingKind.DUPLICATED if detail == SEVERAL_PLACES else FindingKind.LOST
    return Breach(kind, Stage.OUTBOX, topic, count=count, detail=detail, ids=tuple(ids))


def _business(topics: dict[str, str], subject: str, kind: str, detail: str, count: int, abouts: list[str]) -> Breach:
    what: dict[str, Any] = {"subject": subject, "count": count, "detail": detail, "about": tuple(abouts)}
    return Breach(FindingKind(kind), Stage.OUTBOX, topics[subject], **what)


def _ahead(stage: str, topic: str, group: str, count: int, ids: list[str]) -> Breach:
    return Breach(FindingKind.CLOCK, Stage(stage), topic, group=group, count=count, detail=STILL_TO_COME, ids=tuple(ids))


def _late(
    stage: str, group: str, topic: str, source: str, lane: int, key: str, number: int, message_id: str, before: int
) -> Breach:
    return Breach(
        *(FindingKind.OUT_OF_ORDER, Stage(stage), topic, source, lane, group),
        first=number,
        last=number,
        count=1,
        detail=f"after {before} of key {key!r}",
        ids=(message_id,),
    )
