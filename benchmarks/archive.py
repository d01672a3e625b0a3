"""
The archive: how many messages a second go from the database to the lake and out of it, all steps, with a group's inbox rows.

Needs Java, pyspark and the JDBC driver (without the driver it reads by psycopg).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.history import BODY, HEADERS
from outbox import database
from outbox.database import partitions
from outbox.ids import topic_number
from outbox.pipeline.job_config import database_source
from outbox.pipeline.spark import PipelineError
from outbox.pipeline.spark.archiver import ArchiveConfig, Archiver, ArchiveReport
from outbox.pipeline.spark.config import PipelineConfig, Reader
from outbox.pipeline.spark.lake import Lake
from outbox.pipeline.spark.readers import SparkWriter
from outbox.pipeline.spark.records import archive_lock
from outbox.pipeline.spark.session import find_jar, find_java

TARGET = 25_000
MESSAGES = 500_000
DAY = date(2001, 3, 7)

TOPIC = """
INSERT INTO outbox_topic (id, name, type) VALUES (%s, 'bench-archive', 'normal')
ON CONFLICT (id) DO UPDATE SET type = 'normal' RETURNING id
"""

# Ids of the day, made evenly over it; sent in batches of 500, each message handled by one group.
FILL = """
WITH m AS (
    INSERT INTO outbox_message (id, topic_id, key, headers, about, body, created_at)
    SELECT (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '7'
        || substr(replace(gen_random_uuid()::text, '-', ''), 14))::uuid, %(topic)s, n::text, %(headers)s, 'shop.order:' || n,
        %(body)s, at
    FROM (SELECT n, %(day)s::timestamptz + n * interval '1 day' / (%(count)s + 1) AS at FROM generate_series(1, %(count)s) n) made
    RETURNING id, created_at
), numbered AS (SELECT id, created_at, row_number() OVER (ORDER BY id) - 1 AS n FROM m), b AS (
    INSERT INTO outbox_batch (topic_id, lane, first_seq, message_ids, state, claimed_at, decided_at, sent_at)
    SELECT %(topic)s, 1, min(n) + 1, array_agg(id ORDER BY n), 3, max(created_at), max(created_at), max(created_at)
    FROM numbered GROUP BY n / 500
)
INSERT INTO outbox_inbox (consumer_group, idempotency_key, message_id, source, topic, lane, number, delivery_count, handled_at)
SELECT 'bench', id::text, id, 'urn:uuid:bench', 'bench-archive', 1, n + 1, 1, created_at FROM numbered
"""
EMPTY = "DELETE FROM outbox_inbox WHERE consumer_group = 'bench'; DELETE FROM outbox_archived_day; TRUNCATE outbox_batch"


def measure(scale: float = 1.0) -> list[Figure]:
    """Archive a day of messages and inbox rows, after a small day that has Spark started."""
    if reason := missing():
        print(f"    not measured: {reason}", file=sys.stderr)
        return []
    count = int(MESSAGES * scale)
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder, database.connect("default") as connection:
        config = ArchiveConfig(PipelineConfig(database_source("default", _reader())), folder, DAY + timedelta(days=1))
        writer = SparkWriter(config)
        try:
            fill_day(connection, DAY - timedelta(days=1), 5_000)
            first = _archive(config, writer)
            fill_day(connection, DAY, count)
            done = _archive(config, writer)
        finally:
            writer.close()
            connection.execute(EMPTY)
    seen = (
        f"{count / done.seconds:,.0f} messages/s, each with an inbox row; load {os.getloadavg()[0]:.0f}, {os.cpu_count()} cores"
    )
    note = f"{seen}; before that, Spark's start and 5,000 messages: {first.seconds:.1f} s"
    return [Figure("archive: rows of a day, all steps", done.rows / done.seconds, "row/s", TARGET, at_most=False, note=note)]


def _archive(config: ArchiveConfig, writer: SparkWriter) -> ArchiveReport:
    with archive_lock(config.pipeline.outbox.url) as connection:
        done = Archiver(config, connection, Lake(Path(config.lake)), lambda: writer).run()
    assert not done.kept, done.kept
    return done


def missing() -> str:
    """Return what Spark needs and is not here; empty: nothing."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed (make .venv/.spark)"
    try:
        find_java()
    except PipelineError as error:
        return str(error)
    return ""


def _reader() -> Reader:
    try:
        return "jdbc" if find_jar() else "python"
    except PipelineError:
        return "python"


def fill_day(connection: database.Connection, day: date, count: int) -> None:
    """Make a day of messages that were sent and handled."""
    partitions.create_partition(connection, day)
    (topic,) = connection.execute(TOPIC, [topic_number("bench-archive")]).fetchone()
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC)
    connection.execute(FILL, {"topic": topic, "headers": HEADERS, "body": BODY, "day": midnight, "count": count})
    connection.execute("VACUUM ANALYZE outbox_batch, outbox_inbox")
    connection.execute(f"VACUUM ANALYZE {partitions.table_of(day)}")
