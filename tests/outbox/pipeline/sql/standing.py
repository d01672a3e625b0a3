"""Latency and backlog of the frames: what `outbox.pipeline.spark.latency` counts in Spark, counted in SQL."""

from collections import defaultdict
from typing import Any

from outbox.pipeline.spark.measures import BACKWARDS, BINS_PER_DOUBLING, INSTANT, BacklogMinute
from tests.outbox.pipeline.sql.frames import Check

Histogram = tuple[str, str, str, int, int, int]  # topic, hop, consumer group, minute (seconds since 1970), bin, n

# The time in a uuid7, in microseconds; NULL where it is no uuid7.
PUBLISHED = """
CASE WHEN message_id ~ '^[0-9a-f]{8}-[0-9a-f]{4}-7' THEN
    ('x' || left(translate(message_id, '-', ''), 12))::bit(48)::bigint * 1000 END"""

HISTOGRAMS = f"""
WITH hops AS (
    SELECT topic, 'claim' AS hop, '' AS grp, (extract(epoch FROM claimed_at) * 1000000)::bigint AS ended, {PUBLISHED} AS began
    FROM quick_places WHERE state = 'sent'
    UNION ALL
    SELECT topic, 'send', '', (extract(epoch FROM at) * 1000000)::bigint, (extract(epoch FROM claimed_at) * 1000000)::bigint
    FROM quick_places WHERE state = 'sent'
    UNION ALL
    SELECT topic, 'store', '', (extract(epoch FROM at) * 1000000)::bigint, {PUBLISHED} FROM quick_broker
    UNION ALL
    SELECT topic, 'handle', consumer_group, (extract(epoch FROM at) * 1000000)::bigint, {PUBLISHED} FROM quick_inbox
)
SELECT topic, hop, grp, ended / 60000000 * 60, CASE
    WHEN ended - began < -%(tolerance)s THEN {BACKWARDS} WHEN ended - began <= 1 THEN {INSTANT}
    ELSE floor(ln((ended - began)::float8) / ln(2::float8) * {BINS_PER_DOUBLING})::int + 1 END AS bin, count(*)
FROM hops WHERE ended IS NOT NULL AND began IS NOT NULL GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5
"""

# Deliveries that failed or were dropped.
TRIED = """
SELECT consumer_group, topic, message_id, delivery_count, outcome, at FROM quick_failed_deliveries
WHERE outcome IN ('retry', 'dead letter', 'duplicate') AND at IS NOT NULL"""

# What came in, was tried, and was finished, by the minute.
MINUTES = f"""
WITH happened AS (
    SELECT g.name, b.topic, b.at, 1 AS produced, 0 AS deliveries, 0 AS consumed
    FROM quick_broker b JOIN quick_groups g ON g.topic = b.topic
    UNION ALL SELECT consumer_group, topic, at, 0, 1, 1 FROM quick_inbox
    UNION ALL SELECT consumer_group, topic, at, 0, 1, (outcome = 'dead letter')::int FROM ({TRIED}) t
)
SELECT name, topic, floor(extract(epoch FROM at) / 60)::bigint,
    sum(produced)::bigint, sum(deliveries)::bigint, sum(consumed)::bigint
FROM happened WHERE at IS NOT NULL GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""

MOST_REPEATED = f"""
SELECT consumer_group, topic, message_id, failures FROM (
    SELECT *, row_number() OVER (PARTITION BY consumer_group, topic ORDER BY failures DESC, message_id COLLATE "C") AS place
    FROM (
        SELECT consumer_group, topic, message_id, count(*) AS failures FROM ({TRIED}) t
        WHERE outcome <> 'duplicate' GROUP BY 1, 2, 3 HAVING count(*) > 1) a
) b WHERE place <= %(limit)s ORDER BY 1, 2, place
"""


def read_histograms(check: Check, *, tolerance_seconds: float) -> list[Histogram]:
    """Count latencies by topic, hop, group, minute and bin."""
    return [
        (topic, hop, group, minute, place, count)
        for topic, hop, group, minute, place, count in check.run(
            HISTOGRAMS, {"tolerance": int(tolerance_seconds * 1_000_000)}
        ).fetchall()
    ]


def read_minutes(check: Check) -> dict[tuple[str, str], list[BacklogMinute]]:
    """Count by group and topic, minute by minute."""
    found: dict[tuple[str, str], list[BacklogMinute]] = defaultdict(list)
    for group, topic, *counts in check.run(MINUTES).fetchall():
        found[group, topic].append(BacklogMinute(*counts))
    return dict(found)


def read_most_repeated(check: Check, *, limit: int = 10) -> dict[tuple[str, str], list[list[Any]]]:
    """Return the messages tried most often, of each group and topic."""
    found: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for group, topic, message_id, failures in check.run(MOST_REPEATED, {"limit": limit}).fetchall():
        found[group, topic].append([message_id, failures])
    return dict(found)
