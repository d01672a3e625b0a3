"""Audit one history."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from outbox.pipeline.spark.audit.details import with_messages
from outbox.pipeline.spark.audit.keys import audit_keys
from outbox.pipeline.spark.audit.lanes import audit_lanes
from outbox.pipeline.spark.audit.order import audit_order
from outbox.pipeline.spark.audit.topics import audit_topics
from outbox.pipeline.spark.audit.unnumbered import audit_unnumbered
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.errors import HistoryError
from outbox.pipeline.spark.findings import Breach, as_finding
from outbox.pipeline.spark.history import History
from outbox.pipeline.spark.steps import Steps
from outbox.pipeline.spark.times import first_id_at
from outbox.pipeline.spark.transforms.roles import MAX_GROUPS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Report:
    """
    The result of an audit.

    Args:
        counts: topic -> name of the count -> number of messages.
        foreign: rows of other databases' messages, which are not audited.
    """

    as_of: datetime
    findings: list[Breach] = field(default_factory=list)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    foreign: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {
            "as_of": self.as_of.isoformat(),
            "findings": [one.as_dict() for one in self.findings],
            "counts": self.counts,
            "foreign": self.foreign,
        }


def audit(spark: SparkSession, config: PipelineConfig, history: History, steps: Steps | None = None) -> Report:
    """
    Compare business rows, outbox, broker and inbox.

    Raises:
        HistoryError: the history is not sufficient for an audit.
    """
    if len(config.groups) > MAX_GROUPS:
        raise HistoryError(f"There are {len(config.groups)} consumer groups; an audit supports at most {MAX_GROUPS}.")
    steps = steps or Steps()
    recent = history.since(first_id_at(config.since)) if config.since else history

    def judge_ids() -> list[Breach]:
        return [breach for check in CHECKS for breach in check(spark, config, recent)]

    # Run both at the same time, so that one works while the other plans or waits for its last task.
    with steps("comparing the stages"), ThreadPoolExecutor(2) as pool:
        numbers, ids = pool.submit(audit_lanes, spark, config, history), pool.submit(judge_ids)
    lanes = numbers.result()
    with steps("messages of findings"):
        findings = with_messages(spark, config, history, lanes.findings)
    findings += ids.result()
    findings += [as_finding(one) for one in history.broken]
    return Report(history.as_of, sorted(findings), lanes.counts, lanes.foreign)


# The short one first: at the end it would leave a core idle.
CHECKS: tuple[Callable[[SparkSession, PipelineConfig, History], list[Breach]], ...] = (
    audit_unnumbered,
    audit_keys,
    audit_order,
    audit_topics,
)
