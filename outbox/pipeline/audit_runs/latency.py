"""Latency of a run, read back from its minutes: percentiles of each topic and hop, over all of it and over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from outbox.database import Connection
from outbox.pipeline.spark.bins import SHARES, add, percentile

BUCKETS = 96  # points of a line
SPAN = timedelta(days=1)  # up to the newest minute

Hop = tuple[str, str, str]  # topic, hop, consumer group

WHOLE = """
SELECT topic, hop, consumer_group, u.bin, sum(u.n)::bigint FROM outbox_audit_latency, unnest(bins, counts) u(bin, n)
WHERE run_id = %(run)s GROUP BY 1, 2, 3, 4
"""

# The last day in equal parts, the newest one last.
OVER_TIME = """
SELECT topic, hop, consumer_group,
    %(buckets)s - 1 - floor(extract(epoch FROM %(end)s - minute) / %(width)s)::int AS part, u.bin, sum(u.n)::bigint
FROM outbox_audit_latency CROSS JOIN LATERAL unnest(bins, counts) u(bin, n)
JOIN unnest(%(topics)s::text[], %(hops)s::text[], %(groups)s::text[]) w(topic, hop, consumer_group)
    USING (topic, hop, consumer_group)
WHERE run_id = %(run)s AND minute >= %(begin)s
GROUP BY 1, 2, 3, 4, 5
"""

NEWEST = "SELECT max(minute) FROM outbox_audit_latency WHERE run_id = %s"


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of `count` messages; seconds by share, None where none is known."""

    hop: Hop
    count: int
    seconds: dict[float, float | None]


@dataclass(frozen=True, slots=True)
class Course:
    """Percentiles of a hop over time: share -> one value for each part, None where nothing came."""

    hop: Hop
    begins_at: datetime
    ends_at: datetime
    seconds: dict[float, list[float | None]]


def percentiles(connection: Connection, run: int) -> list[Percentiles]:
    """Read the percentiles of all topics and hops of a run, the slowest p99 first."""
    bins: dict[Hop, dict[int, int]] = {}
    for topic, hop, group, place, n in connection.execute(WHOLE, {"run": run}).fetchall():
        bins.setdefault((topic, hop, group), {})[place] = n
    found = [
        Percentiles(hop, sum(counts.values()), {share: percentile(counts, share) for share in SHARES})
        for hop, counts in bins.items()
    ]
    return sorted(found, key=lambda one: (-(one.seconds[0.99] or 0), one.hop))


def courses(connection: Connection, run: int, hops: Sequence[Hop], *, shares: Sequence[float]) -> list[Course]:
    """Read how some hops went on the last day of a run."""
    (newest,) = connection.execute(NEWEST, [run]).fetchone() or (None,)
    if newest is None:
        return []
    end = newest.astimezone(UTC) + timedelta(minutes=1)
    begin = end - SPAN
    width = SPAN.total_seconds() / BUCKETS
    topics, names, groups = ([hop[n] for hop in hops] for n in range(3))
    arguments = {"run": run, "begin": begin, "end": end, "width": width, "buckets": BUCKETS}
    parts: dict[Hop, dict[int, dict[int, int]]] = {hop: {} for hop in hops}
    rows = connection.execute(OVER_TIME, {**arguments, "topics": topics, "hops": names, "groups": groups})
    for topic, hop, group, part, place, n in rows.fetchall():
        counts = parts[topic, hop, group]
        counts[part] = add(counts.get(part, {}), {place: n})
    return [
        Course(
            hop,
            begin,
            end,
            {share: [percentile(counts.get(part, {}), share) for part in range(BUCKETS)] for share in shares},
        )
        for hop, counts in parts.items()
    ]
