"""Prove that nothing was lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError

from outbox.audit import pipeline_config
from outbox.errors import OutboxError
from outbox.management.tables import table
from outbox.pipeline.config import PipelineConfig
from outbox.pipeline.errors import PipelineError

JOB = "outbox.pipeline.jobs.audit"
IDS_SHOWN = 3


class Command(BaseCommand):
    help = (
        "Hold business rows, outbox, broker and inbox to each other over the whole history, by Spark in a process of its own. "
        "Exit code: 0 nothing is wrong, 1 something is, 2 there is no answer."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", default="default", metavar="ALIAS", help="whose outbox (default: default)")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")
        parser.add_argument(
            "--settle", type=float, default=300.0, metavar="SECONDS", help="what is younger is under way (default: 300)"
        )
        parser.add_argument("--since", type=_time, metavar="TIME", help="audit what is younger (default: what was not pruned)")
        parser.add_argument("--reader", choices=["jdbc", "python"], default="jdbc", help="python needs no JDBC driver")
        parser.add_argument("--history", default="", metavar="FOLDER", help="keep what was read there, as Parquet")
        parser.add_argument("--master", default="local[2]", help="Spark's master (default: local[2])")
        parser.add_argument("--driver-memory", default="2g", metavar="SIZE", help="default: 2g")
        parser.add_argument(
            "--print-config", action="store_true", help="print the job's configuration, passwords included, and do nothing"
        )

    def handle(self, **options: Any) -> None:
        try:
            config = _config(options)
        except (OutboxError, PipelineError, DatabaseError, psycopg.Error) as error:
            raise CommandError(str(error).strip(), returncode=2) from error
        if options["print_config"]:
            self.stdout.write(config.to_json())
            return
        report = _run(config, options["history"])
        self.stdout.write(json.dumps(report) if options["json"] else _as_text(report))
        if report["findings"]:
            raise SystemExit(1)


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


_time.__name__ = "time"  # argparse says: invalid time value


def _config(options: dict[str, Any]) -> PipelineConfig:
    more = {"since": options["since"]} if options["since"] else {}
    return pipeline_config(
        options["database"],
        reader=options["reader"],
        settle=timedelta(seconds=options["settle"]),
        master=options["master"],
        driver_memory=options["driver_memory"],
        **more,
    )


def _run(config: PipelineConfig, history: str) -> dict[str, Any]:
    """Run the job as a process, its progress on standard error. The configuration holds passwords: the folder is ours alone."""
    with tempfile.TemporaryDirectory(prefix="outbox-audit-") as folder:
        given, output = Path(folder, "config.json"), Path(folder, "report.json")
        given.write_text(config.to_json())
        command = [sys.executable, "-m", JOB, "--config", str(given), "--output", str(output)]
        code = subprocess.run([*command, "--history", history], env={**os.environ, "TZ": "UTC"}).returncode
        if code not in (0, 1) or not output.exists():
            raise CommandError(f"The audit gave no answer (exit code {code}); what it said is above.", returncode=2)
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def _as_text(report: dict[str, Any]) -> str:
    heads = ["topic", "given out", "sent", "explained", "broker", "under way"]
    rows = [[topic, *(counts.get(head, 0) for head in heads[1:])] for topic, counts in sorted(report["counts"].items())]
    groups = [
        [what.removeprefix("handled by "), topic, count]
        for topic, counts in sorted(report["counts"].items())
        for what, count in sorted(counts.items())
        if what.startswith("handled by ")
    ]
    parts = [f"As of {report['as_of']}", table(heads, rows), table(["group", "topic", "handled"], groups)]
    findings = [_finding(one) for one in report["findings"]]
    parts.append("\n".join(findings) if findings else "Nothing is lost, orphaned, repeated, late or out of order.")
    return "\n\n".join(part for part in parts if part)


def _finding(one: dict[str, Any]) -> str:
    names = [*one["ids"], *one["about"]]
    more = f" and {one['count'] - IDS_SHOWN} more" if one["count"] > IDS_SHOWN and len(names) > IDS_SHOWN else ""
    return f"! {one['text']}{': ' if names else ''}{', '.join(names[:IDS_SHOWN])}{more}"
