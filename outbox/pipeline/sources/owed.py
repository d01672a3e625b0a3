"""
What of a long history can be held to whom. Settings say who reads what today, not who read it years ago.

So of what is older than the live part of a history, a group owes only what was sent after it had handled its first message of
that topic; and where messages have tags, of that tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from outbox.pipeline.config import PipelineConfig
from outbox.pipeline.schemas import FRAMES

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


def add_filtered(spark: SparkSession, config: PipelineConfig, folder: str, live_since: datetime) -> None:
    """
    Add to the frame `attempts` what the broker need not have given a group, for its tag.

    Brokers say so themselves of what they still have. Reads `messages` with their tags, `places`, `inbox`.
    """
    messages = spark.read.parquet(f"{folder}/messages").select("message_id", "topic", F.coalesce("tag", F.lit("")).alias("tag"))
    tagged = {row.topic for row in messages.where("tag <> ''").select("topic").distinct().collect()}
    pairs = [
        (group.name, topic, tags)
        for group in config.groups
        for topic, tags in group.topics.items()
        if tags is not None or topic in tagged
    ]
    if not pairs:
        return
    readers = F.broadcast(spark.createDataFrame(pairs, "consumer_group string, topic string, tags array<string>"))
    mine = messages.where(F.col("topic").isin(*{topic for _, topic, _ in pairs})).select("message_id", "tag")
    inbox = spark.read.parquet(f"{folder}/inbox")
    began = inbox.join(mine, "message_id").groupBy("consumer_group", "topic", "tag").agg(F.min("at").alias("began"))
    live = F.lit(live_since)
    places = spark.read.parquet(f"{folder}/places").where(F.col("state") == "sent").where(F.col("at") < live)
    is_unasked = F.coalesce(~F.array_contains("tags", F.col("tag")), F.lit(False))
    rows = (
        _with_tags(places, mine)
        .join(readers, "topic")
        .join(F.broadcast(began), ["consumer_group", "topic", "tag"], "left")
        .where(is_unasked | (F.col("at") < F.coalesce("began", live)))
        .withColumns({"nth": F.lit(0), "outcome": F.lit("filtered")})
    )
    typed = [F.col(column.name).cast(column.dataType) for column in FRAMES["attempts"]]
    rows.select(*typed).write.mode("append").parquet(f"{folder}/attempts")


def begin_marks(spark: SparkSession, folder: str, since: datetime) -> None:
    """Have each lane begin behind what was claimed before; as `statements.FIRST` has it, over all that the folder has."""
    places = spark.read.parquet(f"{folder}/places").where(F.col("number").isNotNull())
    before = F.max(F.when(F.col("claimed_at") < F.lit(since), F.col("number"))).alias("before")
    lanes = places.groupBy(*LANE).agg(before, F.min("number").alias("lowest")).collect()
    ends = {(row.source, row.topic, row.lane): row.lowest - 1 if row.before is None else row.before for row in lanes}
    marks = spark.read.parquet(f"{folder}/marks").collect()
    found = [(*lane, ends.get(lane, row.last) + 1, row.last) for row in marks for lane in [(row.source, row.topic, row.lane)]]
    spark.createDataFrame(found, FRAMES["marks"]).write.mode("overwrite").parquet(f"{folder}/marks")


def _with_tags(places: DataFrame, tags: DataFrame) -> DataFrame:
    return places.select("source", "topic", "lane", "number", "message_id", "at").join(tags, "message_id")
