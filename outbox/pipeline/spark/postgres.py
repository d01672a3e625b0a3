"""
Copy PostgreSQL's tables and Kafka's topics to a history in Parquet.

    outbox_batch 7: topic 1, lane 1, first_seq 3, message_ids {a, b}  ->  places: orders, 1, 3, a, sent
                                                                                  orders, 1, 4, b, sent

Each database is read in one snapshot. It ends after the copy, so that it does not hold back vacuum during the audit. The brokers'
snapshots are taken first, so that the outbox's snapshot has all messages that brokers have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from outbox.pipeline.spark import HistoryError, PipelineError, statements
from outbox.pipeline.spark.archived import add_archived, broker_spans, snapshot_lake
from outbox.pipeline.spark.config import PipelineConfig, Source
from outbox.pipeline.spark.findings import Breach, broken_rows
from outbox.pipeline.spark.history import FRAMES, RecordedTimes, invalidate_history, write_metadata
from outbox.pipeline.spark.lake import RECORDED
from outbox.pipeline.spark.readers import read_by_jdbc, read_by_psycopg, read_rows
from outbox.pipeline.spark.statements import BROKEN_BATCHES, Statement, exported_snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from outbox.pipeline.spark.kafka import KafkaSnapshot


Log = Callable[[str], None]
Opened = dict[str, tuple[Any, str]]  # URL of a database -> a connection in its snapshot, and the snapshot's name

# Texts in errors that are raised after the connection of a snapshot has ended.
SNAPSHOT_GONE = ("invalid snapshot identifier", "terminating connection", "connection is closed", "server closed the connection")

# Texts in errors that damaged rows do not cause, so reading again with checks would not help.
NO_DAMAGE = ("does not exist", *SNAPSHOT_GONE)


# A part of a frame that is read from PostgreSQL: the database, a connection in its snapshot with the snapshot's name, and the
# queries.
FramePart = tuple[Source, tuple[Any, str], Statement]


def copy_history(spark: SparkSession, config: PipelineConfig, folder: str, log: Log = lambda text: None) -> None:
    """
    Copy the current history to a folder.

    Findings about rows that no release writes are stored in it, as `History.broken`.

    Raises:
        HistoryError: a database or Kafka cannot be read, or a table or column is missing; the text names it.
        LakeError: the lake cannot be read.
        PipelineError: a Kafka cluster is to be read, and the package confluent-kafka is missing.
    """
    brokers_as_of = _now(config.outbox.url) if config.kafka else None
    clusters = _snapshot_clusters(config)
    with ExitStack() as stack:
        opened: Opened = {}
        for source in (*config.brokers, config.outbox):
            if source.url not in opened:
                opened[source.url] = stack.enter_context(exported_snapshot(source.url))
        connection, _ = opened[config.outbox.url]
        lake = snapshot_lake(connection, config.archived, config.since) if config.archived else None
        parts = _parts(spark, config, opened, clusters, is_archived=lake is not None)
        kafka_recorded = {topic: recorded_topic for cluster in clusters for topic, recorded_topic in cluster.recorded.items()}
        recorded = {}
        if config.recorded:
            rows = connection.execute(statements.RECORDED_TOPICS, [list(config.recorded)])
            recorded = {topic: RecordedTimes(began, until) for topic, began, until in rows}
        sources = [row[0] for row in connection.execute(statements.SOURCES)]
        (now,) = connection.execute(statements.NOW).fetchone()
        broken = broken_rows(connection.execute(BROKEN_BATCHES))
        invalidate_history(spark, folder)
        for name, of_frame in parts.items():
            log(f"reading {name}")
            broken += _write(spark, name, of_frame, f"{folder}/{name}", log)
    lake_metadata: dict[str, Any] = {}
    if lake is not None:
        recorded = broker_spans(config, lake, recorded)
        lake_metadata = {"audited_since": lake.since, "owed": add_archived(spark, config, folder, lake, log)}
    write_metadata(
        spark, folder, sources, now, recorded | kafka_recorded, brokers_as_of=brokers_as_of, broken=broken, **lake_metadata
    )


def _now(url: str) -> datetime:
    """Return the time by the database's clock. Raises HistoryError."""
    with exported_snapshot(url) as (connection, _):
        now: datetime = connection.execute(statements.NOW).fetchone()[0]  # type: ignore[index]
    return now


def _snapshot_clusters(config: PipelineConfig) -> list[KafkaSnapshot]:
    """Record the offsets that Kafka's clusters have now. Raises HistoryError; PipelineError if confluent-kafka is missing."""
    if not config.kafka:
        return []
    try:
        from outbox.pipeline.spark.kafka import KafkaSnapshot
    except ImportError as error:
        raise PipelineError('confluent-kafka is missing: pip install "django-transactional-outbox[kafka]"') from error
    return [KafkaSnapshot.of(cluster) for cluster in config.kafka]


def _parts(
    spark: SparkSession, config: PipelineConfig, opened: Opened, clusters: Sequence[KafkaSnapshot], *, is_archived: bool
) -> dict[str, list[FramePart | DataFrame]]:
    """
    Return frame -> its parts.

    Args:
        is_archived: archived days will be added. So marks begin with the first number, and the recorder's rows are returned as a
            separate frame with the lake's columns.
    """
    parts: dict[str, list[FramePart | DataFrame]] = {name: [] for name in FRAMES}
    for source in config.brokers:
        for name, statement in statements.EMBEDDED_BROKER.items():
            parts[name].append((source, opened[source.url], statement))
    outbox = opened[config.outbox.url]
    for cluster in clusters:
        parts["broker"] += cluster.messages(spark)
        parts["failed_deliveries"] += cluster.waiting(spark)
    marks = statements.of_marks(None if is_archived else config.since)
    named_statements = [
        *(statements.OUTBOX | {"marks": marks}).items(),
        *(("business", statements.of_business(entry)) for entry in config.business),
    ]
    if config.recorded and is_archived:
        parts[RECORDED.name] = [read_rows(spark, config.outbox, RECORDED, RECORDED.query(None), outbox[1])]
    elif config.recorded:
        named_statements.append(("broker", statements.of_recorded(config.recorded)))
    for name, statement in named_statements:
        parts[name].append((config.outbox, outbox, statement))
    return parts


def _write(spark: SparkSession, name: str, parts: Sequence[FramePart | DataFrame], path: str, log: Log) -> list[Breach]:
    """Write a frame. If a damaged row may have caused an error, read again with checks; return findings about damaged rows."""
    queries = [part for part in parts if isinstance(part, tuple)]

    def write(*, with_care: bool) -> None:
        frames = [part for part in parts if isinstance(part, DataFrame)]
        frames += [_read(spark, part, FRAMES[name], with_care=with_care) for part in queries]
        frames = frames or [spark.createDataFrame([], FRAMES[name])]
        reduce(DataFrame.unionByName, frames).write.mode("overwrite").parquet(path)

    try:
        try:
            write(with_care=False)
            return []
        except Exception as error:  # errors of tasks are of PySpark or py4j
            has_careful_query = any(statement.careful for _, _, statement in queries)
            if not has_careful_query or any(text in str(error) for text in NO_DAMAGE):
                raise
        log(f"reading {name} again with checks of each value: some rows are damaged")
        write(with_care=True)
        broken_queries = [(connection, statement.broken) for _, (connection, _), statement in queries if statement.broken]
        return [row for connection, statement in broken_queries for row in broken_rows(connection.execute(statement))]
    except Exception as error:
        raise _explained(name, error) from error


def _read(spark: SparkSession, part: FramePart, schema: StructType, *, with_care: bool) -> DataFrame:
    source, (connection, snapshot), statement = part
    query = (statement.careful if with_care else "") or statement.query
    low, high = connection.execute(statement.bounds).fetchone()
    bounds = (low or 0, high or 0)
    if source.reader == "jdbc":
        frame = read_by_jdbc(spark, source, query, bounds, snapshot)
    else:
        frame = read_by_psycopg(spark, source, query, bounds, snapshot, schema)
    return frame.select(*(F.col(column.name).cast(column.dataType) for column in schema))


def _explained(name: str, error: Exception) -> HistoryError:
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines()]
    reason = next((line for line in lines if "error:" in line.lower() or "does not exist" in line), lines[0])
    hint = ""
    if "does not exist" in text:
        hint = " The database's tables are of another version: run migrate."
    if any(sign in text for sign in SNAPSHOT_GONE):
        hint = " The snapshot is gone, because its connection was closed or the server was restarted. Run the job again."
    return HistoryError(f"The frame {name!r} cannot be read: {reason}.{hint}")
