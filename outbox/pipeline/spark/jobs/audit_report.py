"""The report of the audit job: findings, latency and backlog of one history."""

from __future__ import annotations

from dataclasses import replace

from pyspark.sql import SparkSession

from outbox.pipeline.spark.audit.run import audit
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.digest import digest
from outbox.pipeline.spark.history import open_history
from outbox.pipeline.spark.jobs.report import backlog_report, latency_report
from outbox.pipeline.spark.steps import Steps
from outbox.pipeline.spark.times import first_id_at
from outbox.pipeline.spark.version import code_version


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
