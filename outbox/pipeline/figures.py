"""
The figures of a stored run: the counts of consumer groups, and percentiles of latency, in total and over time.

    {"sent": 10, "handled by points": 8}  ->  points: handled 8, dead letters 0, discarded 0, unread 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from outbox.database import Connection
from outbox.pipeline.spark.measures import SHARES, percentile

OF_GROUPS = {
    "handled": "handled by ",
    "dead letters": "dead letters of ",
    "discarded": "discarded by operators for ",
    "unread": "unread by ",
}
"""Table heading -> the prefix of the count's name in `spark/lanes.py`, which is followed by the group."""


def by_group(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return group -> heading -> count, from the counts of a topic. Counts that a run of an older version lacks are 0."""
    by_group_name: dict[str, dict[str, int]] = {}
    for head, prefix in OF_GROUPS.items():
        for name, count in sorted(counts.items()):
            if name.startswith(prefix):
                by_group_name.setdefault(name.removeprefix(prefix), dict.fromkeys(OF_GROUPS, 0))[head] = count
    return by_group_name


def given_up(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a sentence for each group and topic with dead or discarded messages, which are not lost and will not be handled."""
    return [
        f"Group {group!r} has not handled messages of {topic}: {', '.join(parts)}."
        for topic, of_topic in sorted(counts.items())
        for group, of_group in sorted(by_group(of_topic).items())
        if (parts := _parts(of_group["dead letters"], of_group["discarded"]))
    ]


def _parts(dead_letters: int, discarded: int) -> list[str]:
    dead = [f"{dead_letters} {'is a dead letter' if dead_letters == 1 else 'are dead letters'}"] if dead_letters else []
    given_up = [f"{discarded} {'was' if discarded == 1 else 'were'} discarded by operators"] if discarded else []
    return dead + given_up


BUCKETS = 96  # spans of equal length into which a chart divides its time, with one point each
SHARES_DRAWN = (0.5, 0.95, 0.99)
SPAN = timedelta(days=1)  # the charts show the day before the newest minute

Hop = tuple[str, str, str]  # topic, hop, consumer group

# The bins of all hops of a run, without their minutes.
WHOLE = """
SELECT topic, hop, consumer_group, u.bin, sum(u.n)::bigint FROM outbox_audit_latency, unnest(bins, counts) u(bin, n)
WHERE run_id = %(run)s GROUP BY 1, 2, 3, 4
"""

# The last day in buckets of equal length, numbered from the oldest to the newest.
OVER_TIME = """
SELECT topic, hop, consumer_group,
    floor(extract(epoch FROM minute - %(begin)s) / %(width)s)::int AS bucket, u.bin, sum(u.n)::bigint
FROM outbox_audit_latency CROSS JOIN LATERAL unnest(bins, counts) u(bin, n)
JOIN unnest(%(topics)s::text[], %(hops)s::text[], %(groups)s::text[]) w(topic, hop, consumer_group)
    USING (topic, hop, consumer_group)
WHERE run_id = %(run)s AND minute >= %(begin)s
GROUP BY 1, 2, 3, 4, 5
"""

NEWEST = "SELECT max(minute) FROM outbox_audit_latency WHERE run_id = %s"

# The lost messages, by the time in their ids, in buckets of equal length from the first to the last.
LOSSES = """
WITH lost AS (
    SELECT ('x' || left(replace(u.id, '-', ''), 12))::bit(48)::bigint AS at
    FROM outbox_audit_finding f, unnest(f.message_ids) u(id)
    WHERE f.run_id = %(run)s AND f.kind = 'lost' AND u.id ~ '^[0-9a-f]{8}-[0-9a-f]{4}-7'
), span AS (SELECT min(at) AS first, greatest(max(at), min(at) + 59999) + 1 AS last FROM lost)
SELECT first, last, (at - first) * %(buckets)s / (last - first), count(*) FROM lost, span GROUP BY 1, 2, 3
"""


def percentiles(connection: Connection, run: int) -> list[tuple[Hop, int, dict[float, float | None]]]:
    """
    Return each hop of a run with its number of messages and its percentiles, the highest p99 first.

    The percentiles are share -> seconds; None if there was no message.
    """
    bins: dict[Hop, dict[int, int]] = {}
    for topic, hop, group, bin_number, n in connection.execute(WHOLE, {"run": run}).fetchall():
        bins.setdefault((topic, hop, group), {})[bin_number] = n
    latencies = [
        (hop, sum(counts.values()), {share: percentile(counts, share) for share in SHARES}) for hop, counts in bins.items()
    ]
    return sorted(latencies, key=lambda latency: (-(latency[2][0.99] or 0), latency[0]))


Series = tuple[Hop, dict[float, list[float | None]]]  # a hop, and share -> one value per bucket; None if it has no messages


def latency_series(connection: Connection, run: int, hops: Sequence[Hop]) -> tuple[datetime, datetime, list[Series]]:
    """Return begin and end of the last day of a run, and the percentiles of some hops in each of its buckets."""
    [(newest,)] = connection.execute(NEWEST, [run]).fetchall()
    end = (newest or datetime.now(UTC)).astimezone(UTC) + timedelta(minutes=1)
    begin = end - SPAN
    width = SPAN.total_seconds() / BUCKETS
    topics, names, groups = ([hop[n] for hop in hops] for n in range(3))
    arguments = {"run": run, "begin": begin, "width": width}
    buckets: dict[Hop, dict[int, dict[int, int]]] = {hop: {} for hop in hops}
    rows = connection.execute(OVER_TIME, {**arguments, "topics": topics, "hops": names, "groups": groups})
    for topic, hop, group, bucket, bin_number, n in rows.fetchall():
        buckets[topic, hop, group].setdefault(bucket, {})[bin_number] = n
    series = [
        (hop, {share: [percentile(counts.get(bucket, {}), share) for bucket in range(BUCKETS)] for share in SHARES_DRAWN})
        for hop, counts in buckets.items()
    ]
    return begin, end, series


def losses(connection: Connection, run: int) -> tuple[datetime | None, datetime | None, list[int]]:
    """
    Return when the first and the last lost message with a known id were published, and how many in each bucket between them.
    """
    rows = connection.execute(LOSSES, {"run": run, "buckets": BUCKETS}).fetchall()
    counts = {bucket: n for _, _, bucket, n in rows}
    first, last = (datetime.fromtimestamp(rows[0][n] / 1000, UTC) if rows else None for n in range(2))
    return first, last, [counts.get(bucket, 0) for bucket in range(BUCKETS)]
