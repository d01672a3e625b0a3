"""Delete messages and rows that are past their retention."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

import psycopg
from django.core.management.base import BaseCommand

from outbox import database
from outbox.errors import OutboxError
from outbox.management.exits import unable
from outbox.relay.hosts import databases
from outbox.relay.prune import Pruned, prune


class Command(BaseCommand):
    help = (
        "Drop days of messages and delete rows that are past OUTBOX['RETENTION'], as the hourly maintenance does. "
        "Exit code: 0 done, 1 something past its retention was kept, 2 a database cannot be reached."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", action="append", metavar="ALIAS", help="may be repeated (default: all)")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        try:
            done = {alias: _prune(alias) for alias in databases(options["database"])}
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error
        if options["json"]:
            self.stdout.write(json.dumps({alias: pruned.as_json() for alias, pruned in done.items()}))
        else:
            for alias, pruned in done.items():
                self.stdout.write(_as_text(alias, pruned))
        if any(pruned.kept for pruned in done.values()):
            raise SystemExit(1)


def _prune(alias: str) -> Pruned:
    with database.connect(alias) as connection:
        database.ensure_fit(alias, connection)
    return prune(alias)


def _as_text(alias: str, pruned: Pruned) -> str:
    lines = [f"Database {alias!r}"]
    lines += [f"  {day} dropped" for day in pruned.days]
    lines += [f"  {day} kept: {holder}" for day, holder in pruned.kept.items()]
    lines += [f"  {table}: {count} rows deleted" for table, count in pruned.rows.items() if count]
    return "\n".join(lines if len(lines) > 1 else [*lines, "  nothing is past its retention"])
