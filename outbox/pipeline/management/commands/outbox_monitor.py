"""What is missing and what repeats, moment by moment."""

from __future__ import annotations

import json
import signal
from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

import psycopg
from django.core.management.base import BaseCommand
from django.db import DEFAULT_DB_ALIAS
from django.db import Error as DatabaseError

from outbox.errors import OutboxError
from outbox.management.exits import unable
from outbox.management.tables import table
from outbox.pipeline.monitor import LaneStatus, late, run_monitor, standings
from outbox.relay import hosts

HEADS = ["topic", "group", "lane", "seen", "missing", "first missing", "repeated", "failed tries", "highest"]


class Command(BaseCommand):
    help = (
        "Count what was sent, handled, repeated and missing since the last time, by Spark in a process of its own, and go on "
        "until SIGTERM or SIGINT; or do it once. Exit code: 0 nothing is missing for longer than the settle time, 1 something "
        "is, 2 it could not go on."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--checkpoint", required=True, metavar="FOLDER", help="how far it has come; a new one begins anew")
        parser.add_argument("--once", action="store_true", help="apply what there is, and end")
        parser.add_argument(
            "--every", type=float, default=10.0, metavar="SECONDS", help="a micro-batch as often, without --once (default: 10)"
        )
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, metavar="ALIAS", help="whose outbox (default: default)")
        parser.add_argument(
            "--settle", type=float, default=300.0, metavar="SECONDS", help="what is missing for less is under way (default: 300)"
        )
        parser.add_argument("--driver-memory", default="1g", metavar="SIZE", help="default: 1g")
        parser.add_argument("--json", action="store_true", help="print one line of JSON when it ends")

    def handle(self, **options: Any) -> None:
        caught: list[int] = []
        try:
            [using] = hosts.databases([options["database"]])
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, _: caught.append(number))
            run_monitor(
                using,
                options["checkpoint"],
                every=None if options["once"] else options["every"],
                driver_memory=options["driver_memory"],
                is_stopped=lambda: bool(caught),
                say=self._say,
            )
            found, wrong = standings(using), late(using, timedelta(seconds=options["settle"]))
        except (OutboxError, DatabaseError, psycopg.Error) as error:
            raise unable(error) from error
        if options["json"]:
            said = {"lanes": [one.as_json() for one in found], "late": [one.as_json() for one in wrong]}
            self.stdout.write(json.dumps(said))
        else:
            self.stdout.write(_as_text(found, wrong))
        if wrong:
            raise SystemExit(1)

    def _say(self, line: str) -> None:
        self.stderr.write(line, style_func=str)  # progress is no error


def _as_text(found: list[LaneStatus], wrong: list[LaneStatus]) -> str:
    rows = [
        [*(one.topic, one.group or "(outbox)", one.lane, one.seen, one.missing, one.first_missing), *_counts(one)]
        for one in found
    ]
    lines = [
        f"! {one.missing} missing to {one.group or 'the outbox'} in topic {one.topic!r}, lane {one.lane}: the first is number "
        f"{one.first_missing}, since {one.first_missing_since}"
        for one in wrong
    ]
    return "\n".join([table(HEADS, rows), "", *(lines or ["Nothing is missing that is not under way."])])


def _counts(one: LaneStatus) -> tuple[int, int, int | None]:
    return one.duplicates, one.failed, one.highest
