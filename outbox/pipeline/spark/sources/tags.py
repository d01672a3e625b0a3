"""Messages whose tag a group did not ask for, said of by their headers where no broker says it of what it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.schemas import FRAMES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def add_unasked(spark: SparkSession, config: PipelineConfig, folder: str) -> None:
    """Add to the frame `attempts` in a folder what was sent and not meant for a group. Reads `messages` with tags, `places`."""
    asked = config.asked_unseen()
    if not asked:
        return
    readers = F.broadcast(spark.createDataFrame(asked, "consumer_group string, topic string, tags array<string>"))
    tag = F.coalesce("tag", F.lit(""))
    messages = spark.read.parquet(f"{folder}/messages").where(F.col("topic").isin(*{topic for _, topic, _ in asked}))
    unasked = messages.join(readers, "topic").where(~F.array_contains("tags", tag)).select("message_id", "consumer_group")
    places = spark.read.parquet(f"{folder}/places").where(F.col("state") == "sent")
    rows = places.join(unasked, "message_id").withColumns({"nth": F.lit(0), "outcome": F.lit("filtered")})
    typed = [F.col(column.name).cast(column.dataType) for column in FRAMES["attempts"]]
    rows.select(*typed).write.mode("append").parquet(f"{folder}/attempts")
