"""Find messages whose topic has no row, so that no relay claims them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import Breach, unknown_topic
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.sources.broken_rows import NO_TOPIC

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def audit_topics(spark: SparkSession, config: PipelineConfig, history: History) -> list[Breach]:
    """Return findings about topics that messages or their places refer to, and that do not exist."""
    is_gone = F.col("topic").startswith(NO_TOPIC)
    messages, places = (one.where(is_gone).select("topic", "message_id") for one in (history.messages, history.places))
    ids = F.slice(F.sort_array(F.collect_set("message_id")), 1, config.ids_per_finding)
    rows = messages.unionAll(places).groupBy("topic").agg(F.count_distinct("message_id").alias("n"), ids.alias("ids"))
    return [unknown_topic(row.topic, row.n, row.ids) for row in rows.collect()]
