"""
What a micro-batch changes, written in one transaction together with its number: all of it, or nothing; and never twice.

The state of the monitor lies in the database, beside its results: a batch that comes again, because whoever had applied it
died before Spark knew, finds its number and does nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg

from outbox.database.locks import END_IDLE_SNAPSHOT
from outbox.failpoints import failpoint
from outbox.pipeline.spark.errors import PipelineError
from outbox.pipeline.spark.monitor.aggregate import Change
from outbox.pipeline.spark.monitor.lane import FAILED, OUTBOX, SEEN_AS, Lane, Numbers, pack, unpack

LaneKey = tuple[str, str, int]  # source, topic, lane

NO_LANE = -1  # of messages without a number

WAIT = "SET LOCAL lock_timeout = '30s'"  # for a monitor that was thought to be gone

# The row of the job is held till the end: nobody else applies a batch meanwhile.
LAST_BATCH = "SELECT batch FROM outbox_monitor WHERE job = %s FOR UPDATE"
BEGIN_JOB = "INSERT INTO outbox_monitor (job, batch) VALUES (%s, 0)"
NEXT_BATCH = "UPDATE outbox_monitor SET batch = %s, applied_at = clock_timestamp() WHERE job = %s"

# A new job counts from the beginning.
FORGET = (
    "DELETE FROM outbox_monitor",
    "DELETE FROM outbox_monitor_bucket",
    "DELETE FROM outbox_monitor_missing",
    "DELETE FROM outbox_monitor_lane",
)

# Where a lane's numbers begin: at 1, or with the oldest batch that was not pruned.
FIRST = """
SELECT coalesce(min(b.first_seq), 1) FROM outbox_batch b JOIN outbox_topic t ON t.id = b.topic_id
WHERE t.name = %s AND b.lane = %s AND EXISTS (SELECT FROM outbox_source WHERE id = %s)
"""

STANDINGS = "SELECT consumer_group, first_number, highest FROM outbox_monitor_lane WHERE (source, topic, lane) = (%s, %s, %s)"
BUCKETS = """
SELECT bucket, role, consumer_group, bits, n FROM outbox_monitor_bucket
WHERE (source, topic, lane) = (%s, %s, %s) AND bucket = ANY(%s)
"""
STORE_BUCKET = """
INSERT INTO outbox_monitor_bucket (source, topic, lane, bucket, role, consumer_group, bits, n, seen)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)
ON CONFLICT (source, topic, lane, bucket, role, consumer_group)
DO UPDATE SET bits = excluded.bits, n = excluded.n, seen = excluded.seen
"""

# Only buckets in which something is missing have a row.
FORGET_MISSING = "DELETE FROM outbox_monitor_missing WHERE (source, topic, lane) = (%s, %s, %s) AND bucket = ANY(%s)"
STORE_MISSING = """
INSERT INTO outbox_monitor_missing (source, topic, lane, bucket, consumer_group, count, first_number)
VALUES (%s, %s, %s, %s, %s, %s, %s)
"""

# A standing is summed up anew from its buckets. Of what is missing, the first number tells whether it is the same as before.
STORE_STANDING = """
WITH seen AS (
    SELECT coalesce(sum(seen), 0) AS seen, coalesce(sum(n - seen), 0) AS again FROM outbox_monitor_bucket
    WHERE (source, topic, lane, consumer_group) = (%(source)s, %(topic)s, %(lane)s, %(group)s) AND role IN ('sent', 'handled')
), missing AS (
    SELECT coalesce(sum(count), 0) AS count, min(first_number) AS first FROM outbox_monitor_missing
    WHERE (source, topic, lane, consumer_group) = (%(source)s, %(topic)s, %(lane)s, %(group)s)
)
INSERT INTO outbox_monitor_lane AS l (source, topic, lane, consumer_group, first_number, highest, seen, duplicates, missing,
    first_missing, first_missing_since)
SELECT %(source)s, %(topic)s, %(lane)s, %(group)s, %(first)s, %(highest)s, seen.seen,
    CASE WHEN %(group)s = '' THEN 0 ELSE again END, CASE WHEN %(is_judged)s THEN count END, missing.first,
    CASE WHEN missing.first IS NOT NULL THEN clock_timestamp() END
FROM seen, missing
ON CONFLICT (source, topic, lane, consumer_group) DO UPDATE SET highest = excluded.highest, seen = excluded.seen,
    duplicates = excluded.duplicates, missing = excluded.missing, first_missing = excluded.first_missing,
    first_missing_since = CASE WHEN l.first_missing = excluded.first_missing THEN l.first_missing_since
        ELSE excluded.first_missing_since END,
    updated_at = clock_timestamp()
"""

# What has no number is only counted; so are failed tries.
COUNT = """
INSERT INTO outbox_monitor_lane AS l (source, topic, lane, consumer_group, seen, duplicates, failed)
VALUES (%s, %s, %s, %s, %s, %s, %s)
ON CONFLICT (source, topic, lane, consumer_group) DO UPDATE SET seen = l.seen + excluded.seen,
    duplicates = l.duplicates + excluded.duplicates, failed = l.failed + excluded.failed, updated_at = clock_timestamp()
"""


def apply(url: str, job: str, batch: int, changes: Sequence[Change], groups: Mapping[str, Sequence[str]]) -> bool:
    """
    Add a micro-batch to what was seen; False where that had been done.

    Args:
        job: which series of batches; a new one begins with batch 0, and forgets all that others saw.
        groups: topic -> groups that owe each of its messages an inbox row.

    Raises:
        PipelineError: this batch does not follow upon the last one.
    """
    with psycopg.connect(url, application_name="outbox monitor") as connection:
        connection.execute(END_IDLE_SNAPSHOT)
        connection.execute(WAIT)
        if not _take_turn(connection, job, batch):
            return False
        by_lane: dict[LaneKey, list[Change]] = defaultdict(list)
        for one in changes:
            if one.lane is not None and one.role in SEEN_AS:
                by_lane[one.source, one.topic, one.lane].append(one)
        for key, of_lane in sorted(by_lane.items()):
            _apply_to_lane(connection, key, of_lane, groups.get(key[1], ()))
        _count(connection, changes)
        failpoint("monitor.in_transaction")
    failpoint("monitor.after_transaction")
    return True


def _take_turn(connection: psycopg.Connection[Any], job: str, batch: int) -> bool:
    row = connection.execute(LAST_BATCH, [job]).fetchone()
    if row is None and batch == 0:
        for statement in FORGET:
            connection.execute(statement)
        connection.execute(BEGIN_JOB, [job])
        return True
    last = -1 if row is None else row[0]
    if last >= batch:
        return False
    if row is None or last + 1 != batch:
        raise PipelineError(
            f"The checkpoint goes on with batch {batch}, and the tables of the monitor ended with {last}: they do not belong "
            "together (was the database restored?). Name another folder for the checkpoint, and the monitor begins anew."
        )
    connection.execute(NEXT_BATCH, [batch, job])
    return True


def _apply_to_lane(connection: psycopg.Connection[Any], key: LaneKey, changes: Sequence[Change], groups: Sequence[str]) -> None:
    lane = _load(connection, key)
    lane.raise_highest(changes)
    in_doubt = sorted(lane.buckets_in_doubt(changes))
    for bucket, role, group, bits, n in connection.execute(BUCKETS, [*key, in_doubt]):
        lane.buckets.setdefault(bucket, {})[role, group] = Numbers(unpack(bits), n)
    for bucket in in_doubt:
        lane.buckets.setdefault(bucket, {})
    changed = set()
    for one in changes:
        assert one.bucket is not None
        name = SEEN_AS[one.role], one.consumer_group
        lane.buckets[one.bucket].setdefault(name, Numbers()).add(one.bits, one.n)
        changed.add((one.bucket, *name))
    rows = [(bucket, role, group, lane.buckets[bucket][role, group]) for bucket, role, group in sorted(changed)]
    missing = [one for one in lane.missing(groups) if one.count]
    with connection.cursor() as cursor:
        cursor.executemany(
            STORE_BUCKET,
            [(*key, bucket, role, group, pack(of.bits), of.n, int(of.bits.sum())) for bucket, role, group, of in rows],
        )
        cursor.execute(FORGET_MISSING, [*key, in_doubt])
        cursor.executemany(STORE_MISSING, [(*key, one.bucket, one.consumer_group, one.count, one.first) for one in missing])
    for group, highest in sorted(lane.highest.items()):
        values = {"group": group, "highest": highest, "first": lane.first, "is_judged": group in (OUTBOX, *groups)}
        connection.execute(STORE_STANDING, dict(zip(("source", "topic", "lane"), key, strict=True)) | values)


def _load(connection: psycopg.Connection[Any], key: LaneKey) -> Lane:
    standings = connection.execute(STANDINGS, key).fetchall()
    source, topic, number = key
    firsts = [first for _, first, _ in standings if first is not None]
    if not firsts:
        firsts = [first for (first,) in connection.execute(FIRST, [topic, number, source])]
    return Lane(firsts[0], {group: highest for group, _, highest in standings if highest is not None})


def _count(connection: psycopg.Connection[Any], changes: Sequence[Change]) -> None:
    for one in changes:
        is_unnumbered = one.lane is None and one.role in ("sent", "handled")
        counts = (one.n * is_unnumbered, one.n * (one.role == "dropped"), one.n * (one.role in FAILED))
        if any(counts):
            lane = NO_LANE if one.lane is None else one.lane
            connection.execute(COUNT, [one.source, one.topic, lane, one.consumer_group, *counts])
