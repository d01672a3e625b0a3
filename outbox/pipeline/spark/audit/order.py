"""Check the order of keys in ordered topics, at the broker and in the inbox."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.findings import Breach, FindingKind, Stage
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.transforms.order import out_of_order, with_generation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OF_A_KEY = ["topic", "source", "lane", "key"]  # numbers of different lanes cannot be compared


def audit_order(spark: SparkSession, config: PipelineConfig, history: History) -> list[Breach]:
    """Return the messages of ordered topics that came after a later message of their key."""
    if not config.ordered_topics:
        return []
    is_ordered = F.col("topic").isin(*config.ordered_topics)
    tolerance = config.clock_tolerance_seconds
    stored = with_generation(history.broker.where(is_ordered), OF_A_KEY, tolerance_seconds=tolerance)
    late_stored = out_of_order(stored, OF_A_KEY, ["queue", "pos"], ["generation", "queue", "pos"])
    keys = history.messages.where(is_ordered).select("message_id", "key")
    handled = history.inbox.where(is_ordered).join(keys, "message_id")
    late_handled = out_of_order(handled, ["consumer_group", *OF_A_KEY], ["at", "number"])
    return [
        *_findings(Stage.BROKER, late_stored.withColumn("consumer_group", F.lit("")).collect()),
        *_findings(Stage.INBOX, late_handled.collect()),
    ]


def _findings(stage: Stage, rows: Iterable[Any]) -> list[Breach]:
    return [
        Breach(
            *(FindingKind.OUT_OF_ORDER, stage, row.topic, row.source, row.lane),
            group=row.consumer_group,
            first=row.number,
            last=row.number,
            count=1,
            detail=f"after {row.overtaken_by} of key {row.key!r}",
            ids=(row.message_id,),
        )
        for row in rows
    ]
