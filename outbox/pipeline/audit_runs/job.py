"""Run the audit's Spark job in a child process."""

from __future__ import annotations

from datetime import timedelta

from outbox.pipeline.spark import process
from outbox.pipeline.spark.config import PipelineConfig

JOB = "outbox.pipeline.spark.jobs.audit"
ERROR_PREFIX = "Audit failed: "  # begins the line of the job's log that states the reason


def run_job(
    config: PipelineConfig, *, history: str = "", at_most: timedelta | None = None, log: process.Log
) -> process.JobResult:
    """
    Run the audit's job and wait for it.

    Args:
        history: a folder to keep the history in that was read; empty: do not keep it.
        at_most: the time limit.
        log: called with each line of the job's log.
    """
    return process.run_job(JOB, config.to_json(), "--history", history, at_most=at_most, log=log)


def explain(result: process.JobResult) -> str:
    """Return the reason of a failure in one line."""
    return f"The audit failed{result.failure(ERROR_PREFIX)}"
