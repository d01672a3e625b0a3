"""Read database and lake together with Spark: each row once, also while days are being archived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import reduce
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from outbox.pipeline.spark.archive import records
from outbox.pipeline.spark.archive.spark import read_files, read_rows, spark_schema, unreadable_file
from outbox.pipeline.spark.config import Source
from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.lake.commit import Commit
from outbox.pipeline.spark.lake.frames import FRAMES, Frame, Span
from outbox.pipeline.spark.lake.manifest import Lake
from outbox.pipeline.spark.sources.snapshot import exported_snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A day is committed before it leaves the database. So lock the tables first, then list the commits.
HOLD_DAYS = "LOCK TABLE outbox_message IN ACCESS SHARE MODE"


def read_lake(
    spark: SparkSession, lake: Lake, frame: Frame, commits: list[Commit] | None = None, unsettled: Iterable[str] = ()
) -> DataFrame:
    """
    Return the rows of a frame in all commits, each row once. Commits of older versions may lack the frame.

    Args:
        unsettled: days that the database may still have; their rows may also be in the commit of a later day.

    Raises:
        LakeError: a committed file is missing or incomplete.
    """
    commits = lake.committed() if commits is None else commits
    for commit in commits:
        lake.require_files(commit, frame.name)
    times = Counter(commit.day for commit in commits)
    repeated = {day for day, many in times.items() if many > 1}
    if not frame.time:
        return _latest(spark, lake, frame, commits, repeated)
    rows = _files(spark, lake, frame, commits)
    if not (shared := repeated | set(unsettled)):
        return rows
    is_old = F.col(frame.time) < F.lit(Span(date.fromisoformat(max(shared))).end).cast("timestamp")
    return rows.where(~is_old).unionAll(rows.where(is_old).dropDuplicates(list(frame.identity)))


def unsettled_days(commits: Iterable[Commit], deleted: Container[str]) -> set[str]:
    """Return the days in the lake that are not recorded as deleted in the database."""
    return {commit.day for commit in commits if commit.day not in deleted}


@contextmanager
def read_all(spark: SparkSession, source: Source, lake: Lake) -> Iterator[dict[str, DataFrame]]:
    """
    Return all frames of `lake.frames` over database and lake, for use within the block.

    If a row is in both, the one in the database is returned. No day can leave the database before the block ends.

    Raises:
        LakeError: a committed file is missing or incomplete; or, when the rows are read, it is damaged.
        HistoryError: the database cannot be reached.
    """
    with _naming_files(lake), exported_snapshot(source.url) as (connection, snapshot):
        connection.execute(HOLD_DAYS)
        commits = lake.committed()
        unsettled = unsettled_days(commits, records.deleted(connection))
        found = {}
        for name, frame in FRAMES.items():
            database = read_rows(spark, source, frame, frame.query(None), snapshot)
            found[name] = _both(database, read_lake(spark, lake, frame, commits, unsettled), frame, commits)
        yield found


@contextmanager
def _naming_files(lake: Lake) -> Iterator[None]:
    """Raise LakeError with the name of a file that Spark cannot read."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        file = unreadable_file(error)
        if not file.startswith(str(lake.root.absolute())):
            raise
        raise LakeError(f"The file {file} is damaged. Restore it from a backup of the lake.") from error


def _latest(spark: SparkSession, lake: Lake, frame: Frame, commits: list[Commit], repeated: Container[str]) -> DataFrame:
    """Return the rows of all days, from the latest attempt if there are several."""
    parts = [_files(spark, lake, frame, [commit for commit in commits if commit.day not in repeated])]
    several = [
        _files(spark, lake, frame, [commit]).withColumn("commit", F.lit(commit.attempt))
        for commit in commits
        if commit.day in repeated
    ]
    if several:
        latest = Window.partitionBy(*frame.key).orderBy(F.desc("commit"))
        rows = reduce(DataFrame.unionAll, several).withColumn("place", F.row_number().over(latest))
        parts.append(rows.where("place = 1").select(*spark_schema(frame).names))
    return reduce(DataFrame.unionAll, parts)


def _files(spark: SparkSession, lake: Lake, frame: Frame, commits: list[Commit]) -> DataFrame:
    having = [commit.frames[frame.name] for commit in commits if frame.name in commit.frames]
    paths = [str(lake.root / file) for written in having for file in written.files]
    return read_files(spark, frame, paths) if paths else spark.createDataFrame([], spark_schema(frame))


def _both(database: DataFrame, lake: DataFrame, frame: Frame, commits: list[Commit]) -> DataFrame:
    """Add the lake's rows that the database does not have. Few rows in the database are old enough to be in the lake."""
    if not commits:
        return database
    span = Span(date.fromisoformat(max(commit.day for commit in commits)))
    if frame.time:
        old = database.where(F.col(frame.time) < F.lit(span.end).cast("timestamp"))
    else:
        old = database.where(F.col("message_id") < span.end_id)
    return database.unionAll(lake.join(old.select(*frame.identity), list(frame.identity), "left_anti").select(*database.columns))
