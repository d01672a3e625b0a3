"""
What of a long history can be held to whom. Settings say who reads what today, not who read it years ago.

So of what is older than the live part of a history, a group owes only what was sent after it had handled its first message of
that topic. What a group does not want has an inbox row, too.
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
    """Give, by group and topic, from when on the group owes what was sent. Reads the frame `inbox` in a folder."""
    inbox = spark.read.parquet(f"{folder}/inbox")
    rows = inbox.groupBy("consumer_group", "topic").agg(F.unix_micros(F.min("at")).alias("at")).collect()
    began = {(row.consumer_group, row.topic): EPOCH + timedelta(microseconds=row.at) for row in rows}
    pairs = [(group.name, topic) for group in config.groups for topic in group.topics]
    return {pair: min(live_since, began.get(pair, live_since)) for pair in pairs}


def begin_marks(spark: SparkSession, folder: str, since: datetime, *, is_whole: bool) -> None:
    """
    Have each lane begin behind what was claimed before; as `statements.FIRST` has it, over all that the folder has.

    Args:
        is_whole: nothing older was ever dropped: a lane that had claimed nothing by then begins with its first number.
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
