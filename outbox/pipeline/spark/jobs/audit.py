"""
The audit as a job: `spark-submit outbox/pipeline/spark/jobs/audit.py --config audit.json`, or
`python -m outbox.pipeline.spark.jobs.audit`. Exit code: 0 no findings, 1 findings, 2 failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.errors import PipelineError
from outbox.pipeline.spark.jobs import parent
from outbox.pipeline.spark.jobs.unexpected import describe
from outbox.pipeline.spark.session import build_session
from outbox.pipeline.spark.steps import Steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the audit. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="JSON, as PipelineConfig.to_json writes it")
    parser.add_argument("--history", default="", metavar="FOLDER", help="keep the history that was read, as Parquet")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there, as JSON (default: standard output)")
    parser.add_argument("--with-parent", action="store_true", help=parent.HELP)
    options = parser.parse_args(arguments)
    if options.with_parent:
        parent.exit_with_parent()
    try:
        with _folder(options.history) as folder:
            report = run(PipelineConfig.from_file(options.config), folder)
        _write(json.dumps(report), options.output)
    except PipelineError as error:
        _log(f"Audit failed: {error}")
        return 2
    except KeyboardInterrupt:
        _log("Audit failed: it was interrupted.")
        return 2
    except Exception as error:
        _log(f"Audit failed: {describe(error)}")
        return 2
    return int(bool(report["findings"]))


def run(config: PipelineConfig, folder: str) -> dict[str, object]:
    """Start Spark, read the history and audit it. Raises PipelineError."""
    steps, started = Steps(_log), time.monotonic()
    with steps("starting Spark"):
        spark = build_session(config, name="outbox audit", is_light=not config.outbox.is_postgres)
    try:
        # After `build_session`, which says what to install if PySpark is missing.
        from outbox.pipeline.spark.jobs.audit_report import make_report

        report = make_report(spark, config, folder, steps)
    finally:
        spark.stop()
    return {**report, "seconds": round(time.monotonic() - started, 2), "steps": steps.seconds}


@contextmanager
def _folder(given: str) -> Iterator[str]:
    if given:
        yield given
        return
    folder = tempfile.mkdtemp(prefix="outbox-audit-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(text: str, output: Path | None) -> None:
    if output:
        output.write_text(f"{text}\n")
    else:
        sys.stdout.write(f"{text}\n")


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
