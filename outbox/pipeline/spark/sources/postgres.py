"""
PostgreSQL's tables, copied into a history in Parquet.

All of one database is read in one snapshot, which lives no longer than the copying: neither does it hold back vacuum, nor
do jobs read twice. Brokers' databases are opened first: what a broker has, the outbox then has, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from outbox.pipeline.spark.archive.spark import read_rows
from outbox.pipeline.spark.config import PipelineConfig, Source
from outbox.pipeline.spark.errors import HistoryError
from outbox.pipeline.spark.findings import Broken, grouped
from outbox.pipeline.spark.history import Recorded, begin_history, write_about
from outbox.pipeline.spark.lake.frames import RECORDED
from outbox.pipeline.spark.schemas import FRAMES
from outbox.pipeline.spark.sources import jdbc, statements
from outbox.pipeline.spark.sources import rows as python_source
from outbox.pipeline.spark.sources.archived import add_archived, known_at_the_broker, snapshot_lake
from outbox.pipeline.spark.sources.broken_rows import BROKEN_BATCHES
from outbox.pipeline.spark.sources.snapshot import exported_snapshot
from outbox.pipeline.spark.sources.statements import Statement

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Log = Callable[[str], None]
Opened = dict[str, tuple[Any, str]]

SNAPSHOT_GONE = ("invalid snapshot identifier", "terminating connection", "connection is closed", "server closed the connection")
NO_DAMAGE = ("does not exist", *SNAPSHOT_GONE)  # what reading with care does not help against


@dataclass(frozen=True)
class Part:
    """
    What a frame is made of, or a part of it.

    Args:
        opened: a connection in the snapshot, and the snapshot's name.
        statement: None: rows that were read already.
    """

    source: Source
    opened: tuple[Any, str]
    statement: Statement | None
    schema: StructType
    rows: DataFrame | None = None


def copy_history(spark: SparkSession, config: PipelineConfig, folder: str, log: Log = lambda text: None) -> None:
    """
    Write the history as it is now.

    Rows that no release writes, and that cannot be read as they are, are named in `History.broken`.

    Raises:
        HistoryError: a database cannot be reached, or a table or column is missing there; the text names it.
        LakeError: what was archived cannot be read.
    """
    with ExitStack() as stack:
        opened: Opened = {}
        for source in (*config.brokers, config.outbox):
            if source.url not in opened:
                opened[source.url] = stack.enter_context(exported_snapshot(source.url))
        connection, _ = opened[config.outbox.url]
        lake = snapshot_lake(connection, config.archived, config.since) if config.archived else None
        parts = _parts(spark, config, opened, is_archived=lake is not None)
        recorded = {}
        if config.recorded:
            rows = connection.execute(statements.RECORDED_TOPICS, [list(config.recorded)])
            recorded = {topic: Recorded(began, until) for topic, began, until in rows}
        sources = [row[0] for row in connection.execute(statements.SOURCES)]
        (now,) = connection.execute(statements.NOW).fetchone()
        broken = grouped(connection.execute(BROKEN_BATCHES.format(only="true")))
        begin_history(spark, folder)
        for name, of_frame in parts.items():
            log(f"reading {name}")
            broken += _write(spark, name, of_frame, f"{folder}/{name}", log)
    if lake is None:
        write_about(spark, folder, sources, now, recorded, broken=broken)
        return
    recorded = known_at_the_broker(config, lake, recorded)
    owed = add_archived(spark, config, folder, lake, log)
    write_about(spark, folder, sources, now, recorded, judged_since=lake.since, owed=owed, broken=broken)


def _parts(spark: SparkSession, config: PipelineConfig, opened: Opened, *, is_archived: bool) -> dict[str, list[Part]]:
    """Return what each frame is made of; for an archive to add to: all that lanes gave out, what was recorded as it stands."""
    parts: dict[str, list[Part]] = {name: [] for name in FRAMES}
    for source in config.brokers:
        for name, statement in statements.EMBEDDED_BROKER.items():
            parts[name].append(Part(source, opened[source.url], statement, FRAMES[name]))
    ours = opened[config.outbox.url]
    marks = statements.of_marks(None if is_archived else config.since)
    wanted = [
        *(statements.OUTBOX | {"marks": marks}).items(),
        *(("business", statements.of_business(entry)) for entry in config.business),
    ]
    if config.recorded and is_archived:
        rows = read_rows(spark, config.outbox, RECORDED, RECORDED.query(None), ours[1])
        parts[RECORDED.name] = [Part(config.outbox, ours, None, rows.schema, rows)]
    elif config.recorded:
        wanted.append(("broker", statements.of_recorded(config.recorded)))
    for name, statement in wanted:
        parts[name].append(Part(config.outbox, ours, statement, FRAMES[name]))
    return parts


def _write(spark: SparkSession, name: str, parts: Sequence[Part], path: str, log: Log) -> list[Broken]:
    """Write a frame; where its tables hold what cannot be read, once more with care. Return the rows that were in the way."""

    def write(*, with_care: bool) -> None:
        frames = [_read(spark, part, with_care=with_care) for part in parts] or [spark.createDataFrame([], FRAMES[name])]
        reduce(DataFrame.unionByName, frames).write.mode("overwrite").parquet(path)

    try:
        try:
            write(with_care=False)
            return []
        except Exception as error:  # what a task meets comes as PySpark's or the JVM's
            is_careful = any(part.statement is not None and part.statement.careful for part in parts)
            if not is_careful or any(text in str(error) for text in NO_DAMAGE):
                raise
        log(f"reading {name} once more, with care: some rows cannot be read as they are")
        write(with_care=True)
        wanted = [(part.opened[0], part.statement.broken) for part in parts if part.statement is not None]
        return [one for connection, statement in wanted if statement for one in grouped(connection.execute(statement))]
    except Exception as error:
        raise _explained(name, error) from error


def _read(spark: SparkSession, part: Part, *, with_care: bool) -> DataFrame:
    if part.statement is None:
        assert part.rows is not None
        return part.rows
    connection, snapshot = part.opened
    query = (part.statement.careful if with_care else "") or part.statement.query
    low, high = connection.execute(part.statement.bounds).fetchone()
    bounds = (low or 0, high or 0)
    if part.source.reader == "jdbc":
        frame = jdbc.read(spark, part.source, query, bounds, snapshot)
    else:
        frame = python_source.read(spark, part.source, query, bounds, snapshot, part.schema)
    return frame.select(*(F.col(column.name).cast(column.dataType) for column in part.schema))


def _explained(name: str, error: Exception) -> HistoryError:
    text = str(error).strip()
    said = next(
        (line.strip() for line in text.splitlines() if "ERROR:" in line or "error:" in line.lower()), text.splitlines()[0]
    )
    hint = ""
    if "does not exist" in text:
        hint = " The database's tables are of another version than this program: run its migrations."
    if any(said_so in text for said_so in SNAPSHOT_GONE):
        hint = " The snapshot is gone: the connection that held it was closed, or the server was started again. Read again."
    return HistoryError(f"The frame {name!r} cannot be read: {said}.{hint}")
