"""
From when on a group must have handled the messages of a topic. Settings contain the groups of today, not those of years ago.

So in the archived part of a history, a group must have handled the messages sent after it had handled its first one of the
topic. Messages that a group ignores have an inbox row, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.schemas import FRAMES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LANE = ["source", "topic", "lane"]


def owed_from(
    spark: SparkSession, config: PipelineConfig, folder: str, live_since: datetime
) -> Mapping[tuple[str, str], datetime]:
    """Return, by group and topic, from when on the group must have handled sent messages. Reads the frame `inbox` in a folder."""
    inbox = spark.read.parquet(f"{folder}/inbox")
    rows = inbox.groupBy("consumer_group", "topic").agg(F.unix_micros(F.min("at")).alias("at")).collect()
    began = {(row.consumer_group, row.topic): EPOCH + timedelta(microseconds=row.at) for row in rows}
    pairs = [(group.name, topic) for group in config.groups for topic in group.topics]
    return {pair: min(live_since, began.get(pair, live_since)) for pair in pairs}


def begin_marks(spark: SparkSession, folder: str, since: datetime, *, is_whole: bool) -> None:
    """
    Make each lane begin after the numbers that were claimed before `since`, as `statements.FIRST` does in SQL.

    Args:
        is_whole: nothing was ever dropped, so a lane without earlier claims begins with its first number.
    """
    places = spark.read.parquet(f"{folder}/places").where(F.col("number").isNotNull())
    before = F.max(F.when(F.col("claimed_at") < F.lit(since), F.col("number"))).alias("before")
    lanes = places.groupBy(*LANE).agg(before, F.min("number").alias("lowest")).collect()
    ends = {(row.source, row.topic, row.lane): (row.before, 0 if is_whole else row.lowest - 1) for row in lanes}
    marks = spark.read.parquet(f"{folder}/marks").collect()
    found = []
    for row in marks:
        lane = row.source, row.topic, row.lane
        before, otherwise = ends.get(lane, (None, 0 if is_whole else row.last))
        found.append((*lane, 1 + (otherwise if before is None else before), row.last))
    spark.createDataFrame(found, FRAMES["marks"]).write.mode("overwrite").parquet(f"{folder}/marks")
