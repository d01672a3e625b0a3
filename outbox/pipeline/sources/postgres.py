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

from outbox.pipeline.config import PipelineConfig, Source
from outbox.pipeline.errors import HistoryError
from outbox.pipeline.history import Recorded, begin_history, write_about
from outbox.pipeline.schemas import FRAMES
from outbox.pipeline.sources import jdbc, statements
from outbox.pipeline.sources.snapshot import exported_snapshot
from outbox.pipeline.sources.statements import Statement

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Say = Callable[[str], None]
Parts = dict[str, list[DataFrame]]


def copy_history(spark: SparkSession, config: PipelineConfig, folder: str, say: Say = lambda text: None) -> None:
    """
    Write the history as it is now.

    Raises:
        HistoryError: a database cannot be reached, or a table or column is missing there; the text names it.
    """
    parts: Parts = {name: [] for name in FRAMES}
    with ExitStack() as stack:
        opened: dict[str, tuple[Any, str]] = {}
        for source in (*config.brokers, config.outbox):
            if source.url not in opened:
                opened[source.url] = stack.enter_context(exported_snapshot(source.url))
        for source in config.brokers:
            _read_all(spark, source, *opened[source.url], statements.EMBEDDED_BROKER, parts)
        connection, snapshot = opened[config.outbox.url]
        marks = ("marks", statements.of_marks(config.since))
        wanted = [*statements.OUTBOX.items(), marks, *(("business", statements.of_business(entry)) for entry in config.business)]
        for name, statement in wanted:
            parts[name].append(_read(spark, config.outbox, connection, snapshot, name, statement))
        recorded = {}
        if config.recorded:
            recorder = statements.of_recorded(config.recorded)
            parts["broker"].append(_read(spark, config.outbox, connection, snapshot, "broker", recorder))
            rows = connection.execute(statements.RECORDED_TOPICS, [list(config.recorded)])
            recorded = {topic: Recorded(began, until) for topic, began, until in rows}
        sources = [row[0] for row in connection.execute(statements.SOURCES)]
        (now,) = connection.execute(statements.NOW).fetchone()
        begin_history(spark, folder)
        for name, schema in FRAMES.items():
            say(f"reading {name}")
            frame = reduce(DataFrame.unionByName, parts[name] or [spark.createDataFrame([], schema)])
            _write(frame, f"{folder}/{name}", name)
    write_about(spark, folder, sources, now, recorded)


def _read_all(
    spark: SparkSession, source: Source, connection: Any, snapshot: str, wanted: dict[str, Statement], parts: Parts
) -> None:
    for name, statement in wanted.items():
        parts[name].append(_read(spark, source, connection, snapshot, name, statement))


def _read(spark: SparkSession, source: Source, connection: Any, snapshot: str, name: str, statement: Statement) -> DataFrame:
    import psycopg
    from pyspark.errors import PySparkException

    try:
        low, high = connection.execute(statement.bounds).fetchone()
        bounds = (low or 0, high or 0)
        if source.reader == "jdbc":
            frame = jdbc.read(spark, source, statement.query, bounds, snapshot)
        else:
            from outbox.pipeline.sources import rows

            frame = rows.read(spark, source, statement.query, bounds, snapshot, FRAMES[name])
    except (psycopg.Error, PySparkException) as error:
        raise _explained(name, error) from error
    return frame.select(*(F.col(column.name).cast(column.dataType) for column in FRAMES[name]))


def _write(frame: DataFrame, path: str, name: str) -> None:
    from pyspark.errors import PySparkException

    try:
        frame.write.mode("overwrite").parquet(path)
    except PySparkException as error:
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
