"""The audit's Spark job, run in a process of its own."""

from __future__ import annotations

from datetime import timedelta

from outbox.pipeline.spark import process
from outbox.pipeline.spark.config import PipelineConfig

JOB = "outbox.pipeline.spark.jobs.audit"
NO_ANSWER = "No answer: "  # how the job begins the line that says why


def run_job(config: PipelineConfig, *, history: str = "", at_most: timedelta | None = None, say: process.Say) -> process.Ended:
    """
    Run the audit's job and wait for it.

    Args:
        history: a folder that keeps what was read; empty: none does.
        at_most: end the job after that time.
        say: is given what the job says, line by line.
    """
    return process.run_job(JOB, config.to_json(), "--history", history, at_most=at_most, say=say)


def explain(ended: process.Ended) -> str:
    """Return in one line why there is no answer."""
    return f"The audit gave no answer{ended.why(NO_ANSWER)}"
