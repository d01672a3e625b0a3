"""
Audit one history: compare business rows, outbox, broker and inbox, and report what differs.

    tables, Kafka, lake -> history -> lanes, messages, keys, unnumbered, order, topics -> findings, counts
                                   -> latency, backlog, digest                         -> report
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from outbox.pipeline.spark.backlog import backlog_report
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.errors import HistoryError
from outbox.pipeline.spark.findings import Breach, as_finding, unknown_topic
from outbox.pipeline.spark.hashes import digest
from outbox.pipeline.spark.history import History, open_history
from outbox.pipeline.spark.keys import audit_keys
from outbox.pipeline.spark.lake.frames import first_id_at
from outbox.pipeline.spark.lanes import audit_lanes
from outbox.pipeline.spark.latency import latency_report
from outbox.pipeline.spark.messages import with_messages
from outbox.pipeline.spark.order import audit_order
from outbox.pipeline.spark.process import Steps
from outbox.pipeline.spark.roles import MAX_GROUPS
from outbox.pipeline.spark.session import code_version
from outbox.pipeline.spark.sources.statements import NO_TOPIC
from outbox.pipeline.spark.unnumbered import audit_unnumbered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def audit_topics(spark: SparkSession, config: PipelineConfig, history: History) -> list[Breach]:
    """Return findings about topics that messages or their places refer to, and that do not exist."""
    is_gone = F.col("topic").startswith(NO_TOPIC)
    messages, places = (frame.where(is_gone).select("topic", "message_id") for frame in (history.messages, history.places))
    ids = F.slice(F.sort_array(F.collect_set("message_id")), 1, config.ids_per_finding)
    rows = messages.unionAll(places).groupBy("topic").agg(F.count_distinct("message_id").alias("n"), ids.alias("ids"))
    return [unknown_topic(row.topic, row.n, row.ids) for row in rows.collect()]


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
            "findings": [finding.as_dict() for finding in self.findings],
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
    findings += [as_finding(broken) for broken in history.broken]
    return Report(history.as_of, sorted(findings), lanes.counts, lanes.foreign)


# The short one first: at the end it would leave a core idle.
CHECKS: tuple[Callable[[SparkSession, PipelineConfig, History], list[Breach]], ...] = (
    audit_unnumbered,
    audit_keys,
    audit_order,
    audit_topics,
)


def make_report(spark: SparkSession, config: PipelineConfig, folder: str, steps: Steps) -> dict[str, object]:
    """Read the history, or the one in files that the configuration names, and audit it. Raises PipelineError."""
    if config.outbox.is_postgres:
        from outbox.pipeline.spark.sources.postgres import copy_history  # needs psycopg, which a history in files does not

        with steps("copying the history"):
            copy_history(spark, config, folder, steps.log)
    else:
        folder = config.outbox.url
    history = open_history(spark, folder)
    config = replace(config, since=history.judged_since or config.since)
    live = history  # latency and backlog leave out archived days: earlier runs have reported them
    if config.archived and config.archived.live_since:
        live = history.since(first_id_at(config.archived.live_since))
    report = audit(spark, config, history, steps).as_dict()
    with steps("latency"):
        latency = latency_report(spark, config, live)
    report["findings"] += latency.pop("findings")
    with steps("backlog"):
        backlog = backlog_report(spark, config, live)
    with steps("digest"):
        judged = {"sources": sorted(history.sources), "digest": digest(spark, history), "code_version": code_version()}
    report["since"] = config.since.isoformat() if config.since else None
    return {**report, "latency": latency, "backlog": backlog, **judged}
