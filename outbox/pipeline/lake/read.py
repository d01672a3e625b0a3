"""Database and lake as one, by Spark: each row once, wherever it is, and while it moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from outbox.pipeline.archive.spark import read_rows, spark_schema
from outbox.pipeline.config import Source
from outbox.pipeline.lake.base import Commit, Lake, insist_on_files
from outbox.pipeline.lake.frames import FRAMES, Frame, Span
from outbox.pipeline.sources.snapshot import exported_snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Whatever leaves the database later was committed before: so the tables are held, and then the lake is asked what it has.
HOLD_DAYS = "LOCK TABLE outbox_message IN ACCESS SHARE MODE"


def read_lake(spark: SparkSession, lake: Lake, frame: Frame, commits: list[Commit] | None = None) -> DataFrame:
    """
    Give a frame of all days that were committed, each row once.

    Raises:
        LakeError: a file that counts is not there in full.
    """
    commits = lake.committed() if commits is None else commits
    for commit in commits:
        insist_on_files(lake, commit, frame.name)
    times = Counter(commit.day for commit in commits)
    once = [commit for commit in commits if times[commit.day] == 1]
    again = [commit for commit in commits if times[commit.day] > 1]
    parts = [_files(spark, lake, frame, once)]
    if again:
        several = [_files(spark, lake, frame, [commit]).withColumn("commit", F.lit(commit.attempt)) for commit in again]
        latest = Window.partitionBy(*frame.key).orderBy(F.desc("commit"))
        rows = reduce(DataFrame.unionAll, several).withColumn("place", F.row_number().over(latest))
        parts.append(rows.where("place = 1").select(*spark_schema(frame).names))
    return reduce(DataFrame.unionAll, parts)


@contextmanager
def everything(spark: SparkSession, source: Source, lake: Lake) -> Iterator[dict[str, DataFrame]]:
    """
    Give all frames of `lake.frames`, over database and lake; to be used within the block.

    Of a row that is in both, the database's counts. While the block lasts, no day can leave the database.

    Raises:
        LakeError: a file that counts is not there in full.
        HistoryError: the database cannot be reached.
    """
    with exported_snapshot(source.url) as (connection, snapshot):
        connection.execute(HOLD_DAYS)
        commits = lake.committed()
        found = {}
        for name, frame in FRAMES.items():
            database = read_rows(spark, source, frame, frame.query(None), snapshot)
            found[name] = _both(database, read_lake(spark, lake, frame, commits), frame, commits)
        yield found


def _files(spark: SparkSession, lake: Lake, frame: Frame, commits: list[Commit]) -> DataFrame:
    schema = spark_schema(frame)
    paths = [str(lake.root / file) for commit in commits for file in commit.frames[frame.name].files]
    return spark.read.schema(schema).parquet(*paths) if paths else spark.createDataFrame([], schema)


def _both(database: DataFrame, lake: DataFrame, frame: Frame, commits: list[Commit]) -> DataFrame:
    """Add the lake's rows that the database has not. Few of its rows are as old as the lake's newest, so they are looked up."""
    if not commits:
        return database
    span = Span(date.fromisoformat(max(commit.day for commit in commits)))
    if frame.time:
        old = database.where(F.col(frame.time) < F.lit(span.end).cast("timestamp"))
    else:
        old = database.where(F.col("message_id") < span.end_id)
    return database.unionAll(lake.join(old.select(*frame.key), list(frame.key), "left_anti").select(*database.columns))
