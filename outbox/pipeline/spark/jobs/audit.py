"""
The audit as a job: `spark-submit --py-files outbox.zip outbox/pipeline/spark/jobs/audit.py --config audit.json`, or by
`python -m outbox.pipeline.spark.jobs.audit`. Exit code: 0 nothing found, 1 findings, 2 no answer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.errors import PipelineError
from outbox.pipeline.spark.jobs import parent
from outbox.pipeline.spark.jobs.end import describe
from outbox.pipeline.spark.session import build_session
from outbox.pipeline.spark.times import first_id_at
from outbox.pipeline.spark.version import code_version


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the audit as the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="JSON, as PipelineConfig.to_json writes it")
    parser.add_argument("--history", default="", metavar="FOLDER", help="keep the history that was read, as Parquet")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there, as JSON (default: standard output)")
    parser.add_argument("--with-parent", action="store_true", help=parent.HELP)
    options = parser.parse_args(arguments)
    if options.with_parent:
        parent.end_with_it()
    try:
        with _folder(options.history) as folder:
            report = run(PipelineConfig.from_file(options.config), folder)
        _write(json.dumps(report), options.output)
    except PipelineError as error:
        _say(f"No answer: {error}")
        return 2
    except KeyboardInterrupt:
        _say("No answer: it was interrupted.")
        return 2
    except Exception as error:
        _say(f"No answer: {describe(error)}")
        return 2
    return int(bool(report["findings"]))


def run(config: PipelineConfig, folder: str) -> dict[str, object]:
    """Read the history and audit it, in a session of its own. Raises PipelineError."""
    _say("starting Spark")
    spark = build_session(config, name="outbox audit", is_light=not config.outbox.is_postgres)
    try:
        # In here: behind `build_session`, which says what to install where pyspark is missing.
        from outbox.pipeline.spark.audit.run import audit
        from outbox.pipeline.spark.digest import digest
        from outbox.pipeline.spark.history import open_history
        from outbox.pipeline.spark.jobs.report import backlog_report, latency_report

        if config.outbox.is_postgres:
            from outbox.pipeline.spark.sources.postgres import copy_history  # a history in files needs no database's client

            copy_history(spark, config, folder, _say)
        else:
            folder = config.outbox.url
        history = open_history(spark, folder)
        config = replace(config, since=history.judged_since or config.since)
        live = history  # as far as the database has it: latencies of archived days were told before
        if config.archived and config.archived.live_since:
            live = history.since(first_id_at(config.archived.live_since))
        report = audit(spark, config, history, _say).as_dict()
        _say("latency")
        latency = latency_report(spark, config, live)
        report["findings"] += latency.pop("findings")
        _say("backlog")
        backlog = backlog_report(spark, config, live)
        _say("digest")
        judged = {"sources": sorted(history.sources), "digest": digest(spark, history), "code_version": code_version()}
        report["since"] = config.since.isoformat() if config.since else None
        return {**report, "latency": latency, "backlog": backlog, **judged}
    finally:
        spark.stop()


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


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
