"""Pause and resume topics."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

import psycopg
from django.core.management.base import BaseCommand

from outbox import conf, database, topics
from outbox.errors import OutboxError
from outbox.management.acts import actor
from outbox.management.exits import unable
from outbox.relay.hosts import databases
from outbox.topics import Pause


class Command(BaseCommand):
    help = (
        "Pause a topic, as the admin does: relays claim no more of its messages. Publishing continues, and the messages wait. "
        "Messages that the broker already has are delivered. Exit code: 0 done, 1 nothing changed, 2 there is no such topic, or "
        "a database cannot be reached."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("topic", metavar="TOPIC", help="the topic's name")
        parser.add_argument("--resume", action="store_true", help="resume the topic")
        parser.add_argument("--reason", default="", metavar="TEXT", help="why, for other operators")
        parser.add_argument(
            "--by", metavar="NAME", help="the operator's name (default: the command with the system's user and host)"
        )
        parser.add_argument("--database", action="append", metavar="ALIAS", help="may be repeated (default: all)")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, *, topic: str, **options: Any) -> None:
        try:
            aliases = databases(options["database"])
            before = _read(aliases, topic)
            changed = [alias for alias, pause in before.items() if _change(alias, topic, pause, options)]
            after = _read(list(before), topic)
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error
        if options["json"]:
            shown = {alias: _as_json(pause) | {"changed": alias in changed} for alias, pause in after.items()}
            self.stdout.write(json.dumps({"topic": topic, "databases": shown}))
        else:
            for alias, pause in after.items():
                self.stdout.write(_as_text(alias, topic, pause, is_changed=alias in changed))
        if len(changed) < len(after):
            raise SystemExit(1)


def _read(aliases: Sequence[str], topic: str) -> dict[str, Pause | None]:
    """
    Return the topic's pause in each database that has the topic, None if it is not paused there.

    Raises:
        CommandError: no database has the topic.
    """
    pauses_by_alias: dict[str, Pause | None] = {}
    known: set[str] = set(conf.settings().topics)
    for alias in aliases:
        with database.connect(alias, application_name="outbox pause") as connection:
            database.ensure_fit(alias, connection)
            if topic in conf.settings().topics:
                topics.write_topic(connection, topic)  # a new topic may have no row yet
            pauses = topics.pauses(connection)
        known.update(pauses)
        if topic in pauses:
            pauses_by_alias[alias] = pauses[topic]
    if not pauses_by_alias:
        raise unable(f"There is no topic {topic!r}. Choices are: {', '.join(sorted(known)) or 'none'}.")
    return pauses_by_alias


def _change(alias: str, topic: str, pause: Pause | None, options: dict[str, Any]) -> bool:
    """Pause or resume the topic in a database; return whether this changed it."""
    with database.connect(alias, application_name="outbox pause") as connection:
        if not options["resume"]:
            return topics.pause(connection, topic, by=options["by"] or actor("outbox_pause"), reason=options["reason"])
        return pause is not None and topics.resume(connection, topic, since=pause.at)


def _as_text(alias: str, topic: str, pause: Pause | None, *, is_changed: bool) -> str:
    subject = f"Database {alias!r}: topic {topic!r}"
    if pause is None:
        return f"{subject} is resumed." if is_changed else f"{subject} was not paused."
    verb = "is paused" if is_changed else "was paused before"
    by = f" by {pause.by}" if pause.by else ""
    since = f" since {pause.at:%Y-%m-%d %H:%M:%S %Z}" if pause.at else ""
    return f"{subject} {verb}{by}{since}" + (f": {pause.reason}" if pause.reason else ".")


def _as_json(pause: Pause | None) -> dict[str, Any]:
    if pause is None:
        return {"is_paused": False}
    at = pause.at and pause.at.isoformat()
    return {"is_paused": True, "paused_at": at, "paused_by": pause.by, "pause_reason": pause.reason}
