"""Create the daily partitions of coming days, and delete messages and rows that are past their retention."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

import psycopg
from django.core.management.base import BaseCommand

from outbox.errors import OutboxError
from outbox.management.exits import unable
from outbox.relay.hosts import databases
from outbox.relay.maintenance import Pruned, maintain


class Command(BaseCommand):
    help = (
        "Create the daily partitions of coming days, drop partitions past OUTBOX['RETENTION'], and delete other rows past it, as "
        "a relay does each hour. Run it as the owner of the tables, from cron, if relays have another role. "
        "Exit code: 0 done, 1 something past its retention was kept, 2 a database cannot be reached, or refuses a statement."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", action="append", metavar="ALIAS", help="may be repeated (default: all)")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        try:
            done = {alias: maintain(alias) for alias in databases(options["database"])}
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error
        if options["json"]:
            self.stdout.write(json.dumps({alias: result.as_json() for alias, result in done.items()}))
        else:
            for alias, result in done.items():
                self.stdout.write(_as_text(alias, result))
        if any(result.kept for result in done.values()):
            raise SystemExit(1)


def _as_text(alias: str, result: Pruned) -> str:
    lines = [f"Database {alias!r}"]
    lines += [f"  {day} created" for day in result.made]
    lines += [f"  {day} dropped" for day in result.days]
    lines += [f"  {day} kept: {holder}" for day, holder in result.kept.items()]
    lines += [f"  {table}: {count} rows deleted" for table, count in result.rows.items() if count]
    return "\n".join(lines if len(lines) > 1 else [*lines, "  nothing to create, and nothing is past its retention"])
