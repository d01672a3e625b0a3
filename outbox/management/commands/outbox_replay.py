"""List the dead letters of consumer groups, or have them delivered again."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import psycopg
from django.core.management.base import BaseCommand

from outbox import database
from outbox.brokers.base import DeadLetter
from outbox.consuming.dead_letters import Letter, Letters, read_letters, settle_letters
from outbox.consuming.register import group, groups
from outbox.errors import OutboxError
from outbox.management.exits import unable
from outbox.management.tables import table

REASON_CHARACTERS = 60


class Command(BaseCommand):
    help = (
        "List the messages that consumer groups gave up; with MESSAGE_ID or --all, have them delivered to their groups again, "
        "attempts from 1. (What a relay gave up is sent again by outbox_retry.) "
        "Exit code: 0 done, 1 something was not done, 2 a broker cannot be asked."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("message_id", nargs="*", metavar="MESSAGE_ID", help="replay these")
        parser.add_argument("--all", action="store_true", help="replay all that are listed")
        parser.add_argument("--group", action="append", metavar="NAME", help="only of this group; may be repeated")
        parser.add_argument("--topic", action="append", metavar="NAME", help="only of this topic; may be repeated")
        parser.add_argument("--discard", action="store_true", help="let them go for good instead")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        if options["message_id"] and options["all"]:
            raise unable("Say which: MESSAGE_ID... or --all.")
        if options["discard"] and not (options["message_id"] or options["all"]):
            raise unable("Say which to discard: MESSAGE_ID... or --all.")
        try:
            for name in options["group"] or ():
                group(name)
            _require_databases()
            letters = read_letters()
            chosen = [one for one in letters.found if _is_chosen(one.letter, options)]
            if options["message_id"] or options["all"]:
                self._settle(chosen, letters, options)
            else:
                self._list(chosen, letters, as_json=options["json"])
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error

    def _list(self, chosen: Sequence[Letter], letters: Letters, *, as_json: bool) -> None:
        if as_json:
            listed = [asdict(one.letter) | {"broker": one.broker} for one in chosen]
            self.stdout.write(json.dumps({"dead_letters": listed, "troubles": letters.troubles}, default=str))
        else:
            self.stdout.write("\n\n".join([_as_table(chosen) if chosen else "No dead letters.", *letters.troubles]))
        if letters.troubles:
            raise SystemExit(1)

    def _settle(self, chosen: Sequence[Letter], letters: Letters, options: dict[str, Any]) -> None:
        done = list(settle_letters([one.name for one in chosen], discard=options["discard"]))
        found = {one.letter.message_id for one in chosen}
        missing = [message_id for message_id in options["message_id"] if message_id not in found]
        what = "discarded" if options["discard"] else "replayed"
        if options["json"]:
            said = {what: len(done), "not_found": missing, "cut": letters.cut, "troubles": letters.troubles}
            self.stdout.write(json.dumps(said))
        else:
            lines = [f"{len(done)} dead letter{'' if len(done) == 1 else 's'} {what}."]
            lines += [f"{message_id}: no group gave it up, or it was settled before" for message_id in missing]
            lines += [f"Group {name!r} has more of them: call this again." for name in letters.cut]
            self.stdout.write("\n".join([*lines, *letters.troubles]))
        if missing or letters.cut or letters.troubles or len(done) < len(chosen):
            raise SystemExit(1)


def _require_databases() -> None:
    """Raise where the database of a group has no tables, or is away: the broker's answer would say something else."""
    for alias in sorted({one.using for one in groups().values()}):
        with database.connect(alias, application_name="outbox replay") as connection:
            database.ensure_fit(alias, connection)


def _is_chosen(letter: DeadLetter, options: dict[str, Any]) -> bool:
    asked = {"group": letter.group, "topic": letter.topic, "message_id": letter.message_id}
    return all(not options[name] or value in options[name] for name, value in asked.items())


def _as_table(letters: Sequence[Letter]) -> str:
    heads = ["message", "group", "topic", "attempts", "given up at", "reason"]
    rows = [
        [one.message_id, one.group, one.topic, one.attempt, f"{one.died_at:%Y-%m-%d %H:%M:%S %Z}", _shorten(one.reason)]
        for one in (each.letter for each in letters)
    ]
    return table(heads, rows)


def _shorten(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= REASON_CHARACTERS else line[: REASON_CHARACTERS - 1] + "…"
