"""Numbered messages, number by number: the rules of `outbox.pipeline.spark.lanes` in SQL."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import NO_SUCH_LANE, NUMBERS_WITHOUT_LANE, Breach, FindingKind, Stage, merge
from tests.outbox.pipeline.sql.frames import Check

HIGHEST = 32_768 << 34  # as in outbox.pipeline.spark.lanes: numbers from there on are none
NO_NUMBER = "no number at "

# Each numbered row as a number in a role. Young: not older than the settle time.
SEEN = f"""
CREATE TEMP TABLE quick_seen ON COMMIT DROP AS
SELECT stage, source, topic, lane, number, grp, message_id,
    CASE WHEN number BETWEEN 1 AND {HIGHEST} THEN role ELSE '{NO_NUMBER}' || stage END AS role
FROM (
    SELECT 'outbox' AS stage, source, topic, lane, number, '' AS grp, message_id,
        CASE WHEN state = 'sent' THEN CASE WHEN coalesce(at, claimed_at) <= %(cutoff)s THEN 'sent' ELSE 'sent young' END
            WHEN state IN ('dead', 'discarded') THEN 'gone'
            WHEN coalesce(claimed_at, at) <= %(cutoff)s THEN 'open late' ELSE 'open' END AS role
    FROM quick_places
    UNION ALL
    SELECT 'broker', source, topic, lane, number, '', message_id,
        CASE WHEN at <= %(cutoff)s THEN 'stored' ELSE 'stored young' END FROM quick_broker
    UNION ALL
    SELECT 'inbox', i.source, i.topic, i.lane, i.number, i.consumer_group, i.message_id,
        CASE WHEN NOT EXISTS (SELECT FROM quick_groups g WHERE g.name = i.consumer_group) THEN 'foreign group'
            WHEN EXISTS (SELECT FROM quick_groups g WHERE (g.name, g.topic) = (i.consumer_group, i.topic)) THEN 'handled'
            ELSE 'elsewhere' END FROM quick_inbox i
    UNION ALL
    SELECT 'inbox', a.source, a.topic, a.lane, a.number, a.consumer_group, a.message_id,
        CASE WHEN a.outcome IN ('waiting', 'deferred') THEN 'waiting' ELSE 'dead letter' END
    FROM quick_failed_deliveries a WHERE a.outcome IN ('waiting', 'deferred', 'dead', 'discarded')
        AND EXISTS (SELECT FROM quick_groups g WHERE g.name = a.consumer_group)
) r WHERE number IS NOT NULL
"""

# Lanes that rows name and nobody knows; `n`: of the role that names it most often.
UNKNOWN = """
SELECT source, topic, lane, min(lowest), max(highest), max(n) FROM (
    SELECT source, topic, lane, role, grp, min(number) AS lowest, max(number) AS highest, count(*) AS n
    FROM quick_seen s WHERE NOT EXISTS (
        SELECT FROM quick_marks m WHERE (m.source, m.topic, m.lane) = (s.source, s.topic, s.lane))
    GROUP BY 1, 2, 3, 4, 5) r GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""
LEARN = "INSERT INTO quick_marks VALUES (%s, %s, %s, 1, %s)"

# One row for each number that was given out or seen, and in which roles.
NUMBERS = f"""
CREATE TEMP TABLE quick_numbers ON COMMIT DROP AS
SELECT m.source, m.topic, m.lane, n.number, n.number > m.last AS is_beyond,
    bool_or(role IN ('sent', 'sent young', 'open', 'open late', 'gone')) AS is_placed,
    bool_or(role IN ('stored', 'stored young')) AS is_stored,
    bool_or(role = 'stored') AS is_stored_long, bool_or(role = 'sent') AS is_sent_long, bool_or(role = 'open late') AS is_late,
    bool_or(role = 'foreign group') AS is_foreign,
    coalesce(array_agg(grp) FILTER (WHERE role = 'handled'), '{{}}') AS handled,
    coalesce(array_agg(grp) FILTER (WHERE role = 'dead letter'), '{{}}') AS explained,
    coalesce(array_agg(grp) FILTER (WHERE role = 'waiting'), '{{}}') AS waiting
FROM quick_marks m JOIN (
    SELECT source, topic, lane, number, role, grp FROM quick_seen WHERE number BETWEEN 1 AND {HIGHEST}
    UNION ALL
    SELECT source, topic, lane, generate_series(greatest(first, 1), last), 'given out', '' FROM quick_marks
) n USING (source, topic, lane)
WHERE n.number >= m.first GROUP BY 1, 2, 3, 4, 5
"""

# The rules, in the words of docs/pipeline.md; then neighbours as one.
JUDGE = """
WITH wrong AS (
    SELECT n.source, n.topic, n.lane, n.number, v.kind, v.stage, v.grp
    FROM (
        SELECT *, is_foreign OR cardinality(handled) > 0 AS is_arrived, topic = ANY(%(seen_topics)s::text[]) AS is_seen,
            CASE WHEN topic = ANY(%(seen_topics)s::text[]) THEN is_stored_long ELSE is_sent_long END AS is_due
        FROM quick_numbers
    ) n CROSS JOIN LATERAL (
        SELECT 'lost', 'outbox', '' WHERE NOT (is_beyond OR is_placed OR is_stored OR is_arrived)
        UNION ALL SELECT 'orphan', 'broker', '' WHERE is_stored AND NOT is_placed
        UNION ALL SELECT 'orphan', 'inbox', '' WHERE is_foreign AND NOT is_stored AND NOT is_placed
        UNION ALL SELECT 'beyond the last number', 'outbox', '' WHERE is_beyond AND (is_placed OR is_stored OR is_arrived)
        UNION ALL SELECT 'late', 'outbox', '' WHERE is_late
        UNION ALL SELECT 'lost', 'broker', '' WHERE is_seen AND is_sent_long AND NOT is_stored
        UNION ALL SELECT 'orphan', 'inbox', g.name FROM quick_groups g
            WHERE g.topic = n.topic AND g.name = ANY(handled) AND NOT is_stored AND NOT is_placed
        UNION ALL SELECT CASE WHEN g.name = ANY(waiting) THEN 'late' ELSE 'lost' END, 'inbox', g.name FROM quick_groups g
            WHERE g.topic = n.topic AND is_due AND NOT g.name = ANY(handled || explained)
            AND (g.is_from_start OR g.name = ANY(waiting) OR n.number >= (
                SELECT min(s.number) FROM quick_seen s WHERE (s.source, s.topic, s.lane, s.grp, s.role)
                    = (n.source, n.topic, n.lane, g.name, 'handled')))
    ) v(kind, stage, grp)
), islands AS (
    SELECT *, number - row_number() OVER (PARTITION BY source, topic, lane, kind, stage, grp ORDER BY number) AS island FROM wrong
)
SELECT kind, stage, topic, source, lane, grp, min(number), max(number), count(*) FROM islands
GROUP BY kind, stage, topic, source, lane, grp, island
"""

BAD_NUMBERS = f"""
SELECT s.stage, s.topic, s.source, s.lane, min(s.number), max(s.number), count(*)
FROM quick_seen s JOIN quick_marks USING (source, topic, lane) WHERE s.role LIKE '{NO_NUMBER}%%' GROUP BY 1, 2, 3, 4
"""

# Numbers that are there more than once: at a stage, or in a group's inbox.
REPEATED = f"""
SELECT stage, topic, source, lane, grp, number, count(*), (array_agg(DISTINCT message_id ORDER BY message_id))
FROM quick_seen s JOIN quick_marks m USING (source, topic, lane)
WHERE number BETWEEN greatest(m.first, 1) AND {HIGHEST} AND (stage = 'outbox' OR role IN ('stored', 'stored young', 'handled'))
GROUP BY 1, 2, 3, 4, 5, 6 HAVING count(*) > 1
"""

# The messages behind some numbers, of those stages that know them.
IDS = """
SELECT DISTINCT f.nth, s.number, s.message_id
FROM unnest(%(nths)s::int[], %(sources)s::text[], %(topics)s::text[], %(lanes)s::int[], %(firsts)s::bigint[],
    %(lasts)s::bigint[], %(stages)s::text[]) f(nth, source, topic, lane, first, last, stages)
JOIN quick_seen s ON (s.source, s.topic, s.lane) = (f.source, f.topic, f.lane) AND s.number BETWEEN f.first AND f.last
    AND s.stage = ANY(string_to_array(f.stages, ' ')) ORDER BY 1, 2, 3
"""

NAMELESS = (FindingKind.UNKNOWN_LANE, FindingKind.NO_NUMBER)


def judge_lanes(check: Check, config: PipelineConfig, *, cutoff: datetime, sources: Sequence[str]) -> list[Breach]:
    """Hold the stages of all lanes to each other."""
    check.run(SEEN, {"cutoff": cutoff})
    found = _unknown_lanes(check, sources)
    check.run(NUMBERS)
    for kind, stage, topic, source, lane, group, first, last, count in check.run(
        JUDGE, {"seen_topics": list(config.seen_topics)}
    ).fetchall():
        found.append(Breach(FindingKind(kind), Stage(stage), topic, source, lane, group, "", first, last, count))
    for stage, topic, source, lane, first, last, count in check.run(BAD_NUMBERS, []).fetchall():
        span = last - first + 1
        detail = f"{count} of these {span} numbers" if count < span else ""
        numbers_of = {"first": first, "last": last, "count": count, "detail": detail}
        found.append(Breach(FindingKind.NO_NUMBER, Stage(stage), topic, source, lane, **numbers_of))
    found += [_repeat(row, config.ids_per_finding) for row in check.run(REPEATED).fetchall()]
    return _with_ids(check, merge(found), config.ids_per_finding)


def _unknown_lanes(check: Check, sources: Sequence[str]) -> list[Breach]:
    found = []
    for source, topic, lane, first, last, count in check.run(UNKNOWN).fetchall():
        if source in sources and lane is None:
            found.append(Breach(FindingKind.UNKNOWN_LANE, Stage.OUTBOX, topic, source, count=count, detail=NUMBERS_WITHOUT_LANE))
        elif source in sources:
            where = (topic, source, lane)
            found.append(
                Breach(FindingKind.UNKNOWN_LANE, Stage.OUTBOX, *where, first=first, last=last, count=count, detail=NO_SUCH_LANE)
            )
            check.run(LEARN, [source, topic, lane, last])
    return found


def _repeat(row: tuple[Any, ...], limit: int) -> Breach:
    stage, topic, source, lane, group, number, rows, ids = row
    is_one = len(ids) == 1
    kind, count = (FindingKind.DUPLICATED, rows - 1) if is_one else (FindingKind.RENUMBERED, len(ids))
    return Breach(kind, Stage(stage), topic, source, lane, group, "", number, number, count, ids=tuple(ids[:limit]))


def _with_ids(check: Check, findings: list[Breach], limit: int) -> list[Breach]:
    """Fill in the message ids, as many of each finding as are asked for."""
    wanted = [(nth, one, _stages_of(one)) for nth, one in enumerate(findings) if not one.ids and one.kind not in NAMELESS]
    wanted = [(nth, one, stages) for nth, one, stages in wanted if stages]
    arguments = {
        "nths": [nth for nth, _, _ in wanted],
        "sources": [one.source for _, one, _ in wanted],
        "topics": [one.topic for _, one, _ in wanted],
        "lanes": [one.lane for _, one, _ in wanted],
        "firsts": [one.first for _, one, _ in wanted],
        "lasts": [min(one.last, one.first + limit - 1) for _, one, _ in wanted],
        "stages": [stages for _, _, stages in wanted],
    }
    ids: dict[int, dict[int, str]] = {}
    for nth, number, message_id in check.run(IDS, arguments).fetchall() if wanted else ():
        ids.setdefault(nth, {})[number] = message_id
    return [replace(one, ids=tuple(ids[nth].values())) if nth in ids else one for nth, one in enumerate(findings)]


def _stages_of(one: Breach) -> str:
    """Return which stages know the messages of a finding."""
    if one.kind is FindingKind.LOST and one.stage is Stage.OUTBOX:
        return ""
    if one.kind is FindingKind.ORPHAN:
        return str(one.stage)
    return "outbox broker" if one.kind is FindingKind.BEYOND_LAST or one.stage is Stage.INBOX else "outbox"
