"""Compare message types with those of other releases, and with stored messages."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
from django.conf import settings
from django.core.management.base import BaseCommand
from msgspec.structs import asdict

from outbox.errors import OutboxError
from outbox.logs import one_line
from outbox.management.exits import unable
from outbox.message import message_types
from outbox.monitoring import stored
from outbox.monitoring.text import count
from outbox.relay.hosts import databases
from outbox.schema import changes, snapshot

FILE = "outbox_schema.json"
REPORT_EVERY = 100_000  # messages
NOT_WRITTEN = "Nothing was written. Correct the change, or add --accept-breaks if it breaks nobody in your case."


class Command(BaseCommand):
    help = (
        "Compare the message types with the snapshot in your repository, or write the snapshot; or read stored messages with the "
        "code that is about to be deployed. Exit code: 0 nothing to do, 1 a change breaks others or is not in the snapshot, or "
        "a message cannot be read, 2 the snapshot or a message type cannot be read, or the database cannot be reached."
    )
    requires_system_checks: list[str] = []  # they would stop at errors that this command lists with all other problems

    def add_arguments(self, parser: ArgumentParser) -> None:
        mode = parser.add_mutually_exclusive_group(required=True)
        mode.add_argument("--write", action="store_true", help="write the snapshot, unless a change breaks others")
        mode.add_argument(
            "--check", action="store_true", help="write nothing, and fail if a change breaks others or is not in the snapshot"
        )
        mode.add_argument(
            "--against-database",
            action="store_true",
            help=f"read messages that consumers are still to get, {stored.SAMPLE:,} of each list, with the code of this release",
        )
        parser.add_argument("--all", action="store_true", help="with --against-database: read all messages")
        parser.add_argument(
            "--database", action="append", metavar="ALIAS", help="with --against-database; may be repeated (default: all)"
        )
        parser.add_argument(
            "--accept-breaks", action="store_true", help="with --write: write the snapshot although changes break others"
        )
        parser.add_argument(
            "--file", type=Path, metavar="PATH", help=f"the snapshot (default: {FILE} in BASE_DIR, or in the current directory)"
        )
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        if options["accept_breaks"] and not options["write"]:
            raise unable("--accept-breaks can only be used with --write.")
        if (options["all"] or options["database"]) and not options["against_database"]:
            raise unable("--all and --database can only be used with --against-database.")
        if options["against_database"]:
            self._read_stored(options)
        else:
            self._compare(options)

    def _compare(self, options: dict[str, Any]) -> None:
        path: Path = options["file"] or Path(getattr(settings, "BASE_DIR", "")) / FILE
        types = message_types()
        try:
            old, new = snapshot.read(path), snapshot.take(types)
            differences = changes.changes(old, new, types)
            is_refused = any(change.breaks for change in differences) and not options["accept_breaks"]
            is_written = options["write"] and not is_refused and snapshot.write(path, new)
        except OutboxError as error:
            raise unable(error) from error
        if options["json"]:
            shown = {"file": str(path), "written": is_written, "changes": [asdict(change) for change in differences]}
            self.stdout.write(json.dumps(shown))
        else:
            self.stdout.write(_as_text(differences, path, is_written=is_written, is_check=options["check"], types=len(types)))
        if is_refused or (options["check"] and differences):
            raise SystemExit(1)

    def _read_stored(self, options: dict[str, Any]) -> None:
        shown = {}
        for alias in _databases(options["database"]):
            try:
                readings = stored.read_stored(alias, everything=options["all"], progress=self._report, statement_seconds=None)
            except (OutboxError, psycopg.Error) as error:
                raise unable(error) from error
            problems = list(readings.problems())
            shown[alias] = {
                "read": readings.read,
                "cut": sorted(readings.cut),
                "foreign": readings.foreign,
                "problems": [{"text": text, "hint": hint} for text, hint in problems],
            }
            if not options["json"]:
                lines = [f"Database {alias!r}: {readings.text}.", *(f"!!  {text}\n    {hint}" for text, hint in problems)]
                self.stdout.write("\n".join(lines))
        if options["json"]:
            self.stdout.write(json.dumps({"databases": shown}))
        elif any(entry["cut"] for entry in shown.values()):
            self.stdout.write("With --all, all messages are read.")
        if any(entry["problems"] for entry in shown.values()):
            raise SystemExit(1)

    def _report(self, noun: str, number: int) -> None:
        if number % REPORT_EVERY == 0:
            self.stderr.write(f"{count(number, noun)} read")


def _databases(only: list[str] | None) -> list[str]:
    try:
        return databases(only) if only else stored.databases()
    except OutboxError as error:
        raise unable(error) from error


def _as_text(differences: Sequence[changes.Change], path: Path, *, is_written: bool, is_check: bool, types: int) -> str:
    lines = []
    for change in differences:
        lines.append(one_line(f"{'!!' if change.breaks else '!'}  {change.type} {change.text}."))
        lines += [f"    {one_line(change.hint)}"] if change.hint else []
    breaks = sum(change.breaks for change in differences)
    if is_written:
        lines.append(f"{path} written, with {count(types, 'message type')}. Commit it.")
    elif breaks:
        lines.append(f"{count(breaks, 'change')} {'breaks' if breaks == 1 else 'break'} others.")
        lines += [] if is_check else [NOT_WRITTEN]
    elif differences:
        lacks = "does not have this" if path.exists() else "does not exist"
        lines.append(f"{path} {lacks}. Run manage.py outbox_schema --write, and commit it.")
    else:
        lines.append(f"{path} has {count(types, 'message type')}, as they are.")
    return "\n".join(lines)
