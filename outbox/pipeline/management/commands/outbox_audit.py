"""Prove that nothing was lost."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from django.core.management.base import BaseCommand
from django.db import Error as DatabaseError

from outbox.errors import OutboxError
from outbox.management.exits import unable
from outbox.management.tables import table
from outbox.pipeline.audit_runs import verdict
from outbox.pipeline.audit_runs.counts import OF_GROUPS, by_group, given_up
from outbox.pipeline.audit_runs.job import explain, run_job
from outbox.pipeline.audit_runs.run import run_and_store
from outbox.pipeline.errors import AuditFailed, VerdictRefused
from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.errors import PipelineError

IDS_SHOWN = 3


class Command(BaseCommand):
    help = (
        "Hold business rows, outbox, broker and inbox to each other over the whole history, by Spark in a process of its own. "
        "What it finds is stored, and shown in the admin. Exit code: 0 nothing is wrong, 1 something is, 2 there is no answer."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", default="default", metavar="ALIAS", help="whose outbox (default: default)")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")
        parser.add_argument(
            "--settle", type=float, default=300.0, metavar="SECONDS", help="what is younger is under way (default: 300)"
        )
        parser.add_argument("--since", type=_time, metavar="TIME", help="audit what is younger (default: what was not pruned)")
        parser.add_argument(
            "--archived", action="store_true", help="audit what is in the lake of OUTBOX['PIPELINE']['ARCHIVE'], too"
        )
        parser.add_argument("--reader", choices=["jdbc", "python"], default="jdbc", help="python needs no JDBC driver")
        parser.add_argument("--history", default="", metavar="FOLDER", help="keep what was read there, as Parquet")
        parser.add_argument("--master", default="local[2]", help="Spark's master (default: local[2])")
        parser.add_argument("--driver-memory", default="2g", metavar="SIZE", help="default: 2g")
        parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="end it after that time (default: never)")
        parser.add_argument("--no-store", action="store_true", help="leave the database as it is: store no run")
        parser.add_argument("--verdict", type=Path, metavar="FILE", help="write the run's verdict there, signed if a key is set")
        parser.add_argument("--verify", type=Path, metavar="FILE", help="only say whether a verdict is what was signed")
        parser.add_argument(
            "--print-config", action="store_true", help="print the job's configuration, passwords included, and do nothing"
        )

    def handle(self, **options: Any) -> None:
        try:
            if options["verify"]:
                self._verify(options["verify"])
                return
            config = _config(options)
            if options["print_config"]:
                self.stdout.write(config.to_json())
                return
            report = self._run(config, options)
        except (OutboxError, PipelineError, DatabaseError, psycopg.Error, OSError) as error:
            raise unable(error) from error
        self.stdout.write(json.dumps(report) if options["json"] else _as_text(report))
        if report["findings"]:
            raise SystemExit(1)

    def _run(self, config: PipelineConfig, options: dict[str, Any]) -> dict[str, Any]:
        limit = None if options["time_limit"] is None else timedelta(seconds=options["time_limit"])
        if options["no_store"]:
            if options["verdict"]:
                raise unable("A verdict is of a stored run: leave --no-store or --verdict out.")
            ended = run_job(config, history=options["history"], at_most=limit, say=self._say)
            if ended.report is None:
                raise AuditFailed(explain(ended))
            return ended.report
        run, report = run_and_store(
            options["database"], config, asked_by="command", say=self._say, history=options["history"], at_most=limit
        )
        if options["verdict"]:
            options["verdict"].write_text(verdict.as_file(run.verdict, run.signature))
        if not run.signature:
            self._say(f"Run {run.pk} is stored unsigned: there is no key in {verdict.VARIABLE}.")
        return {**report, "run": run.pk}

    def _say(self, line: str) -> None:
        self.stderr.write(line, style_func=str)  # progress is no error

    def _verify(self, path: Path) -> None:
        try:
            told = verdict.verify(path.read_bytes().decode(errors="surrogateescape"))  # newlines as they are
        except VerdictRefused as error:
            self.stdout.write(f"{path}: {error}")
            raise SystemExit(1) from error
        what = "nothing was found" if told["is_clean"] else ", ".join(f"{n} x {what}" for what, n in told["found"].items())
        self.stdout.write(f"{path} is what was signed: run {told['run']}, as of {told['as_of']}, {what}.")


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
        archived=options["archived"],
        master=options["master"],
        driver_memory=options["driver_memory"],
        **more,
    )


def _as_text(report: dict[str, Any]) -> str:
    heads = ["topic", "given out", "sent", "explained", "broker", "under way"]
    rows = [[topic, *(counts.get(head, 0) for head in heads[1:])] for topic, counts in sorted(report["counts"].items())]
    groups = [
        [group, topic, *counts.values()]
        for topic, found in sorted(report["counts"].items())
        for group, counts in by_group(found).items()
    ]
    begin = f"what was published from {report['since']} on" if report["since"] else "all that was ever published"
    parts = [f"As of {report['as_of']}: {begin}.", table(heads, rows), table(["group", "topic", *OF_GROUPS], groups)]
    findings = [_finding(one) for one in report["findings"]]
    parts.append("\n".join(findings) if findings else "Nothing is lost, orphaned, repeated, late or out of order.")
    parts.append("\n".join(given_up(report["counts"])))
    return "\n\n".join(part for part in parts if part)


def _finding(one: dict[str, Any]) -> str:
    names = [*one["ids"], *one["about"]]
    more = f" and {one['count'] - IDS_SHOWN} more" if one["count"] > IDS_SHOWN and len(names) > IDS_SHOWN else ""
    return f"! {one['text']}{': ' if names else ''}{', '.join(names[:IDS_SHOWN])}{more}"
