"""List, replay and discard the dead letters of consumer groups."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import psycopg
from django.core.management.base import BaseCommand

from outbox import conf, database
from outbox.consuming.dead_letters import Letter, Letters, group_letters, groups_with_letters, read_letters, settle_letters
from outbox.consuming.register import groups
from outbox.errors import OutboxError
from outbox.logs import one_line
from outbox.management.actor import actor
from outbox.management.confirm import confirm
from outbox.management.exits import unable
from outbox.management.tables import table
from outbox.management.times import time

FINAL = "This cannot be undone: they can never be delivered to their groups again."


class Command(BaseCommand):
    help = (
        "List the dead letters of consumer groups; with MESSAGE_ID or --all, deliver them to their groups again, with deliveries "
        "counted from 1. (Use outbox_replay_unsent for messages that were not sent.) "
        "Exit code: 0 done, 1 something was not done, 2 a broker cannot be reached."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("message_id", nargs="*", metavar="MESSAGE_ID", help="replay these")
        parser.add_argument("--all", action="store_true", help="replay all listed dead letters")
        parser.add_argument("--group", action="append", metavar="NAME", help="only of this group; may be repeated")
        parser.add_argument("--topic", action="append", metavar="NAME", help="only of this topic; may be repeated")
        parser.add_argument("--error", metavar="TEXT", help="only those whose error or reason contains this text")
        parser.add_argument(
            "--since", type=time, metavar="TIME", help="only those given up since this time: 30m, 2h or 7d ago, or ISO 8601"
        )
        parser.add_argument("--discard", action="store_true", help="discard them instead, after a confirmation")
        parser.add_argument("--no-input", action="store_true", help="discard without a confirmation")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        if options["message_id"] and options["all"]:
            raise unable("Choose either MESSAGE_ID... or --all.")
        if options["discard"] and not (options["message_id"] or options["all"]):
            raise unable("Choose the dead letters to discard: MESSAGE_ID... or --all.")
        try:
            _require_databases()
            known = groups_with_letters()
            for name in set(options["group"] or ()) - set(known):
                raise unable(
                    f"No group is called {name!r}, and none of that name has dead letters. Choices are: {', '.join(known)}."
                )
            is_to_settle = bool(options["message_id"] or options["all"])
            letters = read_letters(is_to_settle=is_to_settle)
            topics = {*conf.settings().topics, *(one.letter.topic for one in letters.found)}
            for name in set(options["topic"] or ()) - topics:
                raise unable(f"There is no topic {name!r}. Choices are: {', '.join(sorted(topics)) or 'none'}.")
            chosen = [one for one in letters.found if _is_chosen(one, options)]
            if is_to_settle:
                self._settle(chosen, letters, options)
            else:
                self._list(chosen, letters, as_json=options["json"])
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error

    def _list(self, chosen: Sequence[Letter], letters: Letters, *, as_json: bool) -> None:
        if as_json:
            listed = [asdict(one.letter) | {"broker": one.broker, "error": one.fingerprint} for one in chosen]
            self.stdout.write(json.dumps({"dead_letters": listed, "troubles": letters.troubles}, default=str))
        else:
            found = [_as_groups(chosen), _as_table(chosen)] if chosen else ["No dead letters."]
            more = [f"Group {name!r} has more dead letters; its oldest are listed." for name in letters.cut]
            self.stdout.write("\n\n".join([*found, *map(one_line, [*more, *letters.troubles])]))
        if letters.troubles:
            raise SystemExit(1)

    def _settle(self, chosen: Sequence[Letter], letters: Letters, options: dict[str, Any]) -> None:
        if options["discard"] and chosen and not options["no_input"]:
            count = f"{len(chosen)} dead letter{'' if len(chosen) == 1 else 's'}"
            confirm(f"{_as_groups(chosen)}\n\n{count} will be discarded. {FINAL}")
        done = list(settle_letters(chosen, by=actor("outbox_replay_unhandled"), discard=options["discard"]))
        found = {one.letter.message_id for one in chosen}
        missing = [message_id for message_id in options["message_id"] if message_id not in found]
        what = "discarded" if options["discard"] else "replayed"
        if options["json"]:
            said = {what: len(done), "not_found": missing, "cut": letters.cut, "troubles": letters.troubles}
            self.stdout.write(json.dumps(said))
        else:
            lines = [f"{len(done)} dead letter{'' if len(done) == 1 else 's'} {what}."]
            lines += [f"{message_id}: not a dead letter of any group, or settled before" for message_id in missing]
            lines += [f"Group {name!r} has more dead letters: run the command again." for name in letters.cut]
            self.stdout.write("\n".join(map(one_line, [*lines, *letters.troubles])))
        if missing or letters.cut or letters.troubles or len(done) < len(chosen):
            raise SystemExit(1)


def _require_databases() -> None:
    """Raise where the database of a group has no tables or cannot be reached, since the broker's answer would hide that."""
    for alias in sorted({one.using for one in groups().values()}):
        with database.connect(alias, application_name="outbox replay") as connection:
            database.ensure_fit(alias, connection)


def _is_chosen(one: Letter, options: dict[str, Any]) -> bool:
    letter = one.letter
    asked = {"group": letter.group, "topic": letter.topic, "message_id": letter.message_id}
    if not all(not options[name] or value in options[name] for name, value in asked.items()):
        return False
    if options["since"] and letter.died_at < options["since"]:
        return False
    return not options["error"] or options["error"].lower() in f"{one.fingerprint}\n{letter.reason}".lower()


def _as_groups(letters: Sequence[Letter]) -> str:
    heads = ["dead letters", "group", "topic", "first", "last", "error"]
    rows = [
        [one.count, one.group, one.topic, _moment(one.first_at), _moment(one.last_at), _in_one_line(one.fingerprint)]
        for one in group_letters(letters)
    ]
    return table(heads, rows)


def _as_table(letters: Sequence[Letter]) -> str:
    heads = ["message", "group", "topic", "deliveries", "given up at", "reason"]
    rows = [
        [one.message_id, one.group, one.topic, one.delivery_count, _moment(one.died_at), _in_one_line(one.reason)]
        for one in (each.letter for each in letters)
    ]
    return table(heads, rows)


def _moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S %Z}"


def _in_one_line(text: str) -> str:
    return " ".join(text.split())
