"""Audit the whole history for lost messages."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
from django.apps import apps
from django.db import Error as DatabaseError

from outbox.errors import OutboxError
from outbox.management.exits import unable
from outbox.management.private_file import write_privately
from outbox.management.tables import table
from outbox.management.times import seconds
from outbox.pipeline import verdict
from outbox.pipeline.errors import AuditFailed, InvalidVerdict
from outbox.pipeline.figures import OF_GROUPS, by_group, given_up
from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.management import JobCommand
from outbox.pipeline.runs import run_and_store
from outbox.pipeline.spark import PipelineError
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.jobs import AUDIT_KEY, run_job

IDS_SHOWN = 3


class Command(JobCommand):
    help = (
        "Compare business rows, outbox, broker and inbox over the whole history, with Spark in a child process. Findings are "
        "stored and shown in the admin. Exit code: 0 no findings, 1 findings, 2 failed."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--database", default="default", metavar="ALIAS", help="audit the outbox of this database (default: default)"
        )
        parser.add_argument(
            "--settle",
            type=seconds,
            default=300.0,
            metavar="SECONDS",
            help="messages younger than this count as in flight (default: 300)",
        )
        parser.add_argument(
            "--since",
            type=_time,
            metavar="TIME",
            help="audit messages published since then (default: all that cannot have been pruned)",
        )
        parser.add_argument("--archived", action="store_true", help="also audit the lake in OUTBOX['PIPELINE']['ARCHIVE']")
        parser.add_argument("--history", default="", metavar="FOLDER", help="keep the history that was read, as Parquet")
        parser.add_argument(
            "--time-limit", type=seconds, metavar="SECONDS", help="stop the audit after this time (default: never)"
        )
        parser.add_argument("--no-store", action="store_true", help="do not store the run in the database")
        parser.add_argument("--verdict", type=Path, metavar="FILE", help="write the run's verdict, signed if a key is set")
        parser.add_argument(
            "--html", type=Path, metavar="FILE", help="write the run's report as one HTML page, which loads nothing"
        )
        parser.add_argument(
            "--site", default="", metavar="URL", help="the URL of the admin's server, for links in --html (default: no links)"
        )
        parser.add_argument("--verify", type=Path, metavar="FILE", help="verify a verdict's signature, and exit")

    def handle(self, **options: Any) -> None:
        try:
            if options["verify"]:
                self._verify(options["verify"])
                return
            config = _config(options)
            if options["write_config"]:
                write_privately(options["write_config"], config.to_json())
                return
            report = self._run(config, options)
        except (OutboxError, PipelineError, DatabaseError, psycopg.Error, OSError) as error:
            raise unable(error) from error
        self.stdout.write(json.dumps(report) if options["json"] else _as_text(report))
        if report["findings"]:
            raise SystemExit(1)

    def _run(self, config: PipelineConfig, options: dict[str, Any]) -> dict[str, Any]:
        if options["html"] and not apps.is_installed("django.contrib.admin"):
            raise unable("--html needs django.contrib.admin in INSTALLED_APPS, which renders the page.")
        limit = None if options["time_limit"] is None else timedelta(seconds=options["time_limit"])
        if options["no_store"]:
            if options["verdict"] or options["html"]:
                raise unable("Only a stored run has a verdict and a page. Leave out --no-store, or --verdict and --html.")
            result = run_job("audit", config.to_json(), "--history", options["history"], at_most=limit, log=self.log)
            if result.report is None:
                raise AuditFailed(f"The audit failed{result.failure()}")
            return result.report
        run, report = run_and_store(
            options["database"], config, asked_by="command", log=self.log, history=options["history"], at_most=limit
        )
        if options["verdict"]:
            options["verdict"].write_text(verdict.as_file(run.verdict, run.signature))
        if options["html"]:
            # Imported only here, because a project may have no admin.
            from outbox.pipeline.admin.audits import report_html

            options["html"].write_text(report_html(run, base=options["site"]))
        if not run.signature:
            self.log(f"Run {run.pk} is not signed: {AUDIT_KEY} is not set.")
        return {**report, "run": run.pk}

    def _verify(self, path: Path) -> None:
        try:
            verified = verdict.verify(path.read_bytes().decode(errors="surrogateescape"))  # `read_text` would translate newlines
        except InvalidVerdict as error:
            self.stdout.write(f"{path}: {error}")
            raise SystemExit(1) from error
        kinds = ", ".join(f"{n} x {what}" for what, n in verified["found"].items()) or "no findings"
        self.stdout.write(f"{path} is valid: run {verified['run']}, as of {verified['as_of']}, {kinds}.")


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


_time.__name__ = "time"  # argparse shows this name in its error: invalid time value


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
    heads = ["topic", "assigned", "sent", "explained", "broker", "in flight"]
    rows = [[topic, *(counts.get(head, 0) for head in heads[1:])] for topic, counts in sorted(report["counts"].items())]
    groups = [
        [group, topic, *counts.values()]
        for topic, of_topic in sorted(report["counts"].items())
        for group, counts in by_group(of_topic).items()
    ]
    scope = f"messages published since {report['since']}" if report["since"] else "all messages ever published"
    steps = ", ".join(f"{name} {took:.1f}" for name, took in report["steps"].items())
    took = f"It took {report['seconds']:.1f} s: {steps}."
    parts = [f"As of {report['as_of']}: {scope}.\n{took}", table(heads, rows), table(["group", "topic", *OF_GROUPS], groups)]
    findings = [_finding(finding) for finding in report["findings"]]
    parts.append("\n".join(findings) if findings else "Nothing is lost, orphaned, repeated, late or out of order.")
    parts.append("\n".join(given_up(report["counts"])))
    return "\n\n".join(part for part in parts if part)


def _finding(finding: dict[str, Any]) -> str:
    names = [*finding["ids"], *finding["about"]]
    more = f" and {finding['count'] - IDS_SHOWN} more" if finding["count"] > IDS_SHOWN and len(names) > IDS_SHOWN else ""
    return f"! {finding['text']}{': ' if names else ''}{', '.join(names[:IDS_SHOWN])}{more}"
