"""
What of a long history can be held to whom. Settings say who reads what today, not who read it years ago.

So of what is older than the live part of a history, a group owes only what was sent after it had handled its first message of
that topic; and where messages have a few tags, of that tag. Tags that name single messages say nothing of who reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.schemas import FRAMES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LANE = ["source", "topic", "lane"]
FEW_TAGS = 100  # of a topic


def owed_from(
    spark: SparkSession, config: PipelineConfig, folder: str, live_since: datetime
) -> Mapping[tuple[str, str], datetime]:
    """Give, by group and topic, from when on the group owes what was sent. Reads the frame `inbox` in a folder."""
    inbox = spark.read.parquet(f"{folder}/inbox")
    rows = inbox.groupBy("consumer_group", "topic").agg(F.unix_micros(F.min("at")).alias("at")).collect()
    began = {(row.consumer_group, row.topic): EPOCH + timedelta(microseconds=row.at) for row in rows}
    pairs = [(group.name, topic) for group in config.groups for topic in group.topics]
    return {pair: min(live_since, began.get(pair, live_since)) for pair in pairs}


def add_filtered(spark: SparkSession, config: PipelineConfig, folder: str, live_since: datetime) -> None:
    """
    Add to the frame `attempts` what the broker need not have given a group, for its tag.

    Brokers say so themselves of what they still have. Reads `messages` with their tags, `places`, `inbox`.
    """
    messages = spark.read.parquet(f"{folder}/messages").select("message_id", "topic", F.coalesce("tag", F.lit("")).alias("tag"))
    counted = messages.groupBy("topic").agg(F.count_distinct("tag").alias("n"), F.max("tag").alias("highest")).collect()
    by_tag = {row.topic for row in counted if row.highest and row.n <= FEW_TAGS}
    pairs = [
        (group.name, topic, tags, topic in by_tag)
        for group in config.groups
        for topic, tags in group.topics.items()
        if tags is not None or topic in by_tag
    ]
    if not pairs:
        return
    columns = "consumer_group string, topic string, tags array<string>, by_tag boolean"
    readers = F.broadcast(spark.createDataFrame(pairs, columns))
    mine = messages.where(F.col("topic").isin(*{topic for _, topic, *_ in pairs})).select("message_id", "tag")
    inbox = spark.read.parquet(f"{folder}/inbox")
    theirs = inbox.where(F.col("topic").isin(*by_tag)) if by_tag else inbox.limit(0)
    began = theirs.join(mine, "message_id").groupBy("consumer_group", "topic", "tag").agg(F.min("at").alias("began"))
    live = F.lit(live_since)
    places = spark.read.parquet(f"{folder}/places").where(F.col("state") == "sent").where(F.col("at") < live)
    is_unasked = F.coalesce(~F.array_contains("tags", F.col("tag")), F.lit(False))
    rows = (
        _with_tags(places, mine)
        .join(readers, "topic")
        .join(F.broadcast(began), ["consumer_group", "topic", "tag"], "left")
        .where(is_unasked | (F.col("by_tag") & (F.col("at") < F.coalesce("began", live))))
        .withColumns({"nth": F.lit(0), "outcome": F.lit("filtered")})
    )
    typed = [F.col(column.name).cast(column.dataType) for column in FRAMES["attempts"]]
    rows.select(*typed).write.mode("append").parquet(f"{folder}/attempts")


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


def _with_tags(places: DataFrame, tags: DataFrame) -> DataFrame:
    return places.select("source", "topic", "lane", "number", "message_id", "at").join(tags, "message_id")
