"""Send dead messages again, or skip them."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any
from uuid import UUID

import psycopg
from django.core.management.base import BaseCommand

from outbox import database
from outbox.batches.retry import RetryResult, retry_all, retry_messages
from outbox.errors import OutboxError
from outbox.logs import one_line
from outbox.management.actor import actor
from outbox.management.exits import unable
from outbox.relay.hosts import databases

# Topics of which messages were or are published; 0 is not one.
TOPIC_NAMES = "SELECT name FROM outbox_topic WHERE id <> 0 ORDER BY name"


class Command(BaseCommand):
    help = (
        "Have dead messages sent again, their tries forgotten. Exit code: 0 done, 1 something was not done, "
        "2 the database cannot be asked."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("message_id", nargs="*", type=_uuid, metavar="MESSAGE_ID", help="these dead messages")
        parser.add_argument("--topic", metavar="NAME", help="all dead messages of a topic")
        parser.add_argument("--all-dead", action="store_true", help="all dead messages")
        parser.add_argument("--skip", action="store_true", help="skip them for good instead; nobody sends them any more")
        parser.add_argument("--database", default="default", metavar="ALIAS", help="where they are (default: default)")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        if [bool(options["message_id"]), bool(options["topic"]), options["all_dead"]].count(True) != 1:
            raise unable("Say which: MESSAGE_ID..., or --topic NAME, or --all-dead.")
        try:
            (alias,) = databases([options["database"]])
            with database.connect(alias, application_name="outbox retry") as connection:
                database.ensure_fit(alias, connection)
                settled = _settle(connection, options)
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error
        self.stdout.write(json.dumps(asdict(settled)) if options["json"] else _as_text(settled, skip=options["skip"]))
        if settled.refused or not settled.messages:
            raise SystemExit(1)


def _uuid(text: str) -> UUID:
    return UUID(text)


_uuid.__name__ = "message id"  # argparse says: invalid message id value


def _settle(connection: database.Connection, options: dict[str, Any]) -> RetryResult:
    if options["message_id"]:
        return retry_messages(connection, options["message_id"], by=actor("outbox_retry"), skip=options["skip"])
    if options["topic"]:
        _insist_on_topic(connection, options["topic"])
    return retry_all(connection, by=actor("outbox_retry"), topic=options["topic"], skip=options["skip"])


def _insist_on_topic(connection: database.Connection, name: str) -> None:
    known = [topic for (topic,) in connection.execute(TOPIC_NAMES).fetchall()]
    if name not in known:
        raise unable(f"There is no topic {name!r} in this database, but {', '.join(known) or 'none'}.")


def _as_text(settled: RetryResult, *, skip: bool) -> str:
    if not settled.messages and not settled.refused:
        return "No message is dead."
    count = f"{settled.messages} message{'' if settled.messages == 1 else 's'}"
    done = f"{count} skipped." if skip else f"{count} will be sent again."
    return "\n".join([done, *(one_line(f"{message_id}: {reason}") for message_id, reason in settled.refused.items())])
