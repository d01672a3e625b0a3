"""Write a synthetic history and its expected findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.synthetic.frames import as_of, make_frames
from benchmarks.synthetic.plan import GROUP, SOURCE, Plan, Truth, draw, expected
from outbox.pipeline.spark.config import AuditedGroup, Business, PipelineConfig, Source
from outbox.pipeline.spark.findings import FindingKind, Stage, merge
from outbox.pipeline.spark.history import invalidate_history, write_metadata

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEVER_PUBLISHED = ((FindingKind.LOST, Stage.OUTBOX), (FindingKind.ORPHAN, Stage.BROKER), (FindingKind.ORPHAN, Stage.INBOX))


def write_history(spark: SparkSession, plan: Plan, folder: str) -> dict[str, Any]:
    """Write all frames; return the expected findings, and the configuration of the audit."""
    truth = draw(plan)
    invalidate_history(spark, folder)
    for name, frame in make_frames(spark, plan, truth).items():
        frame.write.mode("overwrite").parquet(f"{folder}/{name}")
    write_metadata(spark, folder, [SOURCE], as_of(plan))
    without_message = [
        *(f"shop.order:{n}-unsaid" for n in truth.of(FindingKind.LOST, Stage.BUSINESS)),
        *(f"shop.order:{n}" for (kind, stage) in NEVER_PUBLISHED for messages in truth.faults.get((kind, stage), {}).values()
          for n in messages),
    ]  # fmt: skip
    return truth_of(plan, truth, config_of(plan, folder), without_message)


def truth_of(plan: Plan, truth: Truth, config: PipelineConfig, without_message: list[str]) -> dict[str, Any]:
    """Return the expected findings, and the configuration of the audit."""
    return {
        "messages": plan.messages,
        "findings": [one.as_dict() for one in merge(expected(plan, truth))],
        "orders without a message": sorted(without_message),
        "config": config.to_json(),
    }


def config_of(plan: Plan, folder: str) -> PipelineConfig:
    """Return the audit's configuration for this history."""
    topics = [f"topic-{topic}" for topic in range(plan.topics)]
    return PipelineConfig(
        outbox=Source(folder),
        business=[Business(topic, topic, "shop.order", "OrderPlaced") for topic in topics],
        groups=[AuditedGroup(GROUP(group), list(topics)) for group in range(plan.groups)],
        seen_topics=topics,
        ids_per_finding=100,
    )
