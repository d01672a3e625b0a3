"""
PostgreSQL's tables, copied into a history in Parquet.

All of one database is read in one snapshot, which lives no longer than the copying: neither does it hold back vacuum, nor
do jobs read twice. Brokers' databases are opened first: what a broker has, the outbox then has, too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructType

from outbox.pipeline.spark.archive.spark import read_rows
from outbox.pipeline.spark.config import PipelineConfig, Source
from outbox.pipeline.spark.errors import HistoryError
from outbox.pipeline.spark.history import Recorded, begin_history, write_about
from outbox.pipeline.spark.lake.frames import RECORDED
from outbox.pipeline.spark.schemas import FRAMES
from outbox.pipeline.spark.sources import jdbc, statements
from outbox.pipeline.spark.sources.archived import add_archived, hold, known_at_the_broker
from outbox.pipeline.spark.sources.snapshot import exported_snapshot
from outbox.pipeline.spark.sources.statements import Statement
from outbox.pipeline.spark.sources.tags import add_unasked

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Say = Callable[[str], None]
Parts = dict[str, list[DataFrame]]

WITH_TAG = StructType([*FRAMES["messages"]]).add("tag", StringType())


def copy_history(spark: SparkSession, config: PipelineConfig, folder: str, say: Say = lambda text: None) -> None:
    """
    Write the history as it is now.

    Raises:
        HistoryError: a database cannot be reached, or a table or column is missing there; the text names it.
        LakeError: what was archived cannot be read.
    """
    with ExitStack() as stack:
        opened: dict[str, tuple[Any, str]] = {}
        for source in (*config.brokers, config.outbox):
            if source.url not in opened:
                opened[source.url] = stack.enter_context(exported_snapshot(source.url))
        connection, _ = opened[config.outbox.url]
        held = hold(connection, config.archived, config.since) if config.archived else None
        parts = _parts(spark, config, opened, is_archived=held is not None)
        recorded = {}
        if config.recorded:
            rows = connection.execute(statements.RECORDED_TOPICS, [list(config.recorded)])
            recorded = {topic: Recorded(began, until) for topic, began, until in rows}
        sources = [row[0] for row in connection.execute(statements.SOURCES)]
        (now,) = connection.execute(statements.NOW).fetchone()
        begin_history(spark, folder)
        for name, frames in parts.items():
            say(f"reading {name}")
            frame = reduce(DataFrame.unionByName, frames or [spark.createDataFrame([], FRAMES[name])])
            _write(frame, f"{folder}/{name}", name)
    if held is None:
        add_unasked(spark, config, folder)
        write_about(spark, folder, sources, now, recorded)
        return
    recorded = known_at_the_broker(config, held, recorded)
    owed = add_archived(spark, config, folder, held, say)
    add_unasked(spark, config, folder)
    write_about(spark, folder, sources, now, recorded, judged_since=held.since, owed=owed)


def _parts(spark: SparkSession, config: PipelineConfig, opened: dict[str, tuple[Any, str]], *, is_archived: bool) -> Parts:
    """Give what each frame is made of; for an archive to add to: all that lanes ever gave out, what was recorded as it stands."""
    parts: Parts = {name: [] for name in FRAMES}
    for source in config.brokers:
        _read_all(spark, source, *opened[source.url], statements.EMBEDDED_BROKER, parts)
    connection, snapshot = opened[config.outbox.url]
    marks = statements.of_marks(None if is_archived else config.since)
    wanted = [
        *(statements.OUTBOX | {"marks": marks}).items(),
        *(("business", statements.of_business(entry)) for entry in config.business),
    ]
    if config.recorded and is_archived:
        parts[RECORDED.name] = [read_rows(spark, config.outbox, RECORDED, RECORDED.query(None), snapshot)]
    elif config.recorded:
        wanted.append(("broker", statements.of_recorded(config.recorded)))
    schemas = FRAMES | {"messages": WITH_TAG} if is_archived or config.asked_unseen() else FRAMES
    for name, statement in wanted:
        parts[name].append(_read(spark, config.outbox, connection, snapshot, name, statement, schemas[name]))
    return parts


def _read_all(
    spark: SparkSession, source: Source, connection: Any, snapshot: str, wanted: dict[str, Statement], parts: Parts
) -> None:
    for name, statement in wanted.items():
        parts[name].append(_read(spark, source, connection, snapshot, name, statement, FRAMES[name]))


def _read(
    spark: SparkSession, source: Source, connection: Any, snapshot: str, name: str, statement: Statement, schema: StructType
) -> DataFrame:
    # Here: a node of a cluster that only reads files has no libpq, without which psycopg cannot be imported.
    import psycopg
    from pyspark.errors import PySparkException

    try:
        low, high = connection.execute(statement.bounds).fetchone()
        bounds = (low or 0, high or 0)
        if source.reader == "jdbc":
            frame = jdbc.read(spark, source, statement.query, bounds, snapshot)
        else:
            # Here: Spark 3 has no Python data sources, and reads by JDBC.
            from outbox.pipeline.spark.sources import rows

            frame = rows.read(spark, source, statement.query, bounds, snapshot, schema)
    except (psycopg.Error, PySparkException) as error:
        raise _explained(name, error) from error
    return frame.select(*(F.col(column.name).cast(column.dataType) for column in schema))


def _write(frame: DataFrame, path: str, name: str) -> None:
    try:
        frame.write.mode("overwrite").parquet(path)
    except Exception as error:  # what a task meets comes as PySpark's or the JVM's
        raise _explained(name, error) from error


def _explained(name: str, error: Exception) -> HistoryError:
    text = str(error).strip()
    said = next(
        (line.strip() for line in text.splitlines() if "ERROR:" in line or "error:" in line.lower()), text.splitlines()[0]
    )
    hint = ""
    if "does not exist" in text:
        hint = " The database's tables are of another version than this program: run its migrations."
    if "invalid snapshot identifier" in text:
        hint = " The snapshot is gone: the connection that held it was closed, or the server was started again. Read again."
    return HistoryError(f"The frame {name!r} cannot be read: {said}.{hint}")
