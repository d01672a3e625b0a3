"""
The audit as a job: `spark-submit outbox/pipeline/spark/jobs/audit.py --config audit.json`, or
`python -m outbox.pipeline.spark.jobs.audit`. Exit code: 0 no findings, 1 findings, 2 failed.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from outbox.pipeline.spark import jobs
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.jobs import Steps
from outbox.pipeline.spark.session import build_session


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the audit. Return the exit code."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--history", default="", metavar="FOLDER", help="keep the history that was read, as Parquet")
    return jobs.main("Audit", parser, arguments, _audit, wrong="findings")


def _audit(options: Namespace) -> dict[str, object]:
    with TemporaryDirectory(prefix="outbox-audit-", ignore_cleanup_errors=True) as folder:
        return run(PipelineConfig.from_file(options.config), options.history or folder)


def run(config: PipelineConfig, folder: str) -> dict[str, object]:
    """Start Spark, read the history and audit it. Raises PipelineError."""
    steps, started = Steps(jobs.log), time.monotonic()
    with steps("starting Spark"):
        spark = build_session(config, name="outbox audit", is_light=not config.outbox.is_postgres)
    try:
        # After `build_session`, which says what to install if PySpark is missing.
        from outbox.pipeline.spark.audit import make_report

        report = make_report(spark, config, folder, steps)
    finally:
        spark.stop()
    return {**report, "seconds": round(time.monotonic() - started, 2), "steps": steps.seconds}


if __name__ == "__main__":
    sys.exit(main())
