"""Tell whether other releases can read the messages of this one, and this one theirs."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from outbox.errors import OutboxError
from outbox.logs import one_line
from outbox.management.exits import unable
from outbox.message import message_types
from outbox.monitoring.text import count
from outbox.schema import changes, snapshot

FILE = "outbox_schema.json"


class Command(BaseCommand):
    help = (
        "Compare the message types with the snapshot in your repository, or write it. Exit code: 0 nothing to do, 1 a change "
        "breaks others or is not in the snapshot, 2 the snapshot or a message type cannot be read."
    )
    requires_system_checks: list[str] = []  # its own texts name more than the first problem

    def add_arguments(self, parser: ArgumentParser) -> None:
        does = parser.add_mutually_exclusive_group(required=True)
        does.add_argument("--write", action="store_true", help="write the snapshot; not while a change breaks others")
        does.add_argument(
            "--check", action="store_true", help="write nothing, and fail where a change breaks others or is not in the snapshot"
        )
        parser.add_argument("--accept-breaks", action="store_true", help="with --write: write it although changes break others")
        parser.add_argument("--file", type=Path, metavar="PATH", help=f"the snapshot (default: {FILE} in BASE_DIR)")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        path: Path = options["file"] or Path(getattr(settings, "BASE_DIR", "")) / FILE
        if options["accept_breaks"] and not options["write"]:
            raise unable("--accept-breaks is for --write.")
        types = message_types()
        try:
            old, new = snapshot.read(path), snapshot.take(types)
            found = changes.changes(old, new, types)
            is_refused = any(one.breaks for one in found) and not options["accept_breaks"]
            is_written = options["write"] and not is_refused and snapshot.write(path, new)
        except OutboxError as error:
            raise unable(error) from error
        if options["json"]:
            shown = {"file": str(path), "written": is_written, "changes": [asdict(one) for one in found]}
            self.stdout.write(json.dumps(shown))
        else:
            self.stdout.write(_as_text(found, path, is_written=is_written, types=len(types)))
        if is_refused or (options["check"] and found):
            raise SystemExit(1)


def _as_text(found: Sequence[changes.Change], path: Path, *, is_written: bool, types: int) -> str:
    lines = []
    for one in found:
        lines.append(one_line(f"{'!!' if one.breaks else '!'}  {one.type} {one.text}."))
        lines += [f"    {one_line(one.hint)}"] if one.hint else []
    breaks = sum(one.breaks for one in found)
    if is_written:
        lines.append(f"{path} written, with {count(types, 'message type')}. Commit it.")
    elif breaks:
        lines.append(f"{count(breaks, 'change')} {'breaks' if breaks == 1 else 'break'} others. Nothing was written.")
    elif found:
        lacks = "does not have this" if path.exists() else "does not exist"
        lines.append(f"{path} {lacks}. Run manage.py outbox_schema --write, and commit it.")
    else:
        lines.append(f"{path} has {count(types, 'message type')}, as they are.")
    return "\n".join(lines)
