"""Replay or discard dead messages: those that were not sent."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any
from uuid import UUID

import psycopg
from django.core.management.base import BaseCommand

from outbox import database
from outbox.batches.operators import ActResult, replay_all, replay_messages
from outbox.errors import OutboxError
from outbox.logs import one_line
from outbox.management.actor import actor
from outbox.management.confirm import confirm
from outbox.management.exits import unable
from outbox.management.tables import table
from outbox.models import State
from outbox.relay.hosts import databases

# All topics; the row with id 0 is not a topic.
TOPIC_NAMES = "SELECT name FROM outbox_topic WHERE id <> 0 ORDER BY name"

# Dead messages by ids, by topic, or all.
DEAD = f"""
SELECT count(*), t.name, (array_agg(b.last_error ORDER BY b.id))[1], array_agg(u.id ORDER BY b.id, u.n)
FROM outbox_batch b JOIN outbox_topic t ON t.id = b.topic_id, unnest(b.message_ids) WITH ORDINALITY u(id, n)
WHERE b.state = {State.DEAD} AND u.n <> ALL(b.split) AND (%(ids)s::uuid[] IS NULL OR u.id = ANY(%(ids)s))
    AND (%(topic)s::text IS NULL OR t.name = %(topic)s) GROUP BY t.name ORDER BY t.name
"""  # noqa: S608  (a number of ours)


class Command(BaseCommand):
    help = (
        "Send dead messages again, which the broker rejected, with failures counted from zero. (Use outbox_replay_unhandled for "
        "messages that a consumer group gave up.) Exit code: 0 done, 1 something was not done, 2 the database cannot be reached."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("message_id", nargs="*", type=_uuid, metavar="MESSAGE_ID", help="ids of dead messages")
        parser.add_argument("--topic", metavar="NAME", help="all dead messages of a topic")
        parser.add_argument("--all", action="store_true", help="all dead messages")
        parser.add_argument("--discard", action="store_true", help="discard them instead, after a confirmation")
        parser.add_argument("--no-input", action="store_true", help="discard without a confirmation")
        parser.add_argument("--database", default="default", metavar="ALIAS", help="their database (default: default)")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        if [bool(options["message_id"]), bool(options["topic"]), options["all"]].count(True) != 1:
            raise unable("Choose one of MESSAGE_ID..., --topic NAME and --all.")
        try:
            (alias,) = databases([options["database"]])
            with database.connect(alias, application_name="outbox replay") as connection:
                database.ensure_fit(alias, connection)
                if options["topic"]:
                    _require_topic(connection, options["topic"])
                if options["discard"] and not options["no_input"]:
                    settled = _discard_confirmed(connection, options)
                else:
                    settled = _settle(connection, options)
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error
        self.stdout.write(json.dumps(asdict(settled)) if options["json"] else _as_text(settled, discard=options["discard"]))
        if settled.refused or not settled.messages:
            raise SystemExit(1)


def _uuid(text: str) -> UUID:
    return UUID(text)


_uuid.__name__ = "message id"  # argparse says: invalid message id value


def _discard_confirmed(connection: database.Connection, options: dict[str, Any]) -> ActResult:
    """Discard the messages that the user was asked about; those that die in the meantime stay dead."""
    found = connection.execute(DEAD, {"ids": options["message_id"] or None, "topic": options["topic"]}).fetchall()
    if found:
        rows = table(["dead messages", "topic", "first reason"], [row[:3] for row in found])
        confirm(f"{rows}\n\nThey will be discarded. This cannot be undone: discarded messages are never sent again.")
    chosen = options["message_id"] or [message_id for row in found for message_id in row[3]]
    return replay_messages(connection, chosen, by=actor("outbox_replay_unsent"), discard=True)


def _settle(connection: database.Connection, options: dict[str, Any]) -> ActResult:
    if options["message_id"]:
        return replay_messages(connection, options["message_id"], by=actor("outbox_replay_unsent"), discard=options["discard"])
    return replay_all(connection, by=actor("outbox_replay_unsent"), topic=options["topic"], discard=options["discard"])


def _require_topic(connection: database.Connection, name: str) -> None:
    known = [topic for (topic,) in connection.execute(TOPIC_NAMES).fetchall()]
    if name not in known:
        raise unable(f"There is no topic {name!r} in this database. Choices are: {', '.join(known) or 'none'}.")


def _as_text(settled: ActResult, *, discard: bool) -> str:
    if not settled.messages and not settled.refused:
        return "No message is dead."
    count = f"{settled.messages} message{'' if settled.messages == 1 else 's'}"
    done = f"{count} discarded." if discard else f"{count} will be sent again."
    return "\n".join([done, *(one_line(f"{message_id}: {reason}") for message_id, reason in settled.refused.items())])
