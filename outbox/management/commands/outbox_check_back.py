"""Answer a check-back about one message, in the same way as if a broker had asked."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

import psycopg
from django.core.management.base import BaseCommand

from outbox.check_backs.answer import answer
from outbox.check_backs.resolve import Answer
from outbox.check_backs.sources import connect, find
from outbox.database import ensure_fit, is_refusal, outbox_databases
from outbox.errors import OutboxError
from outbox.logs import one_line
from outbox.management.exits import unable
from outbox.message import UNKNOWN, Half


class Command(BaseCommand):
    help = (
        "Print the answer to a check-back about one message. As if a broker had asked, the answer is recorded, and a batch whose "
        "lease is over is taken back from its relay. Exit code: 0 COMMIT or ROLLBACK, 1 UNKNOWN, 2 there is no such message, or "
        "a database cannot be reached, or refuses a statement."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("message_id", metavar="MESSAGE_ID", help="id of the message")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, *, message_id: str, json: bool, **options: Any) -> None:
        topic, state, half, alias = _find(message_id)
        if half is None:
            given = Answer(UNKNOWN, f"The message has no half message that a broker could ask about; it is {state}.")
        else:
            given = answer(half, asked_by="command", using=alias)
        as_output = _as_json if json else _as_text
        self.stdout.write(as_output(message_id, topic, state, half, given))
        if given.resolution is UNKNOWN:
            raise SystemExit(1)


def _find(message_id: str) -> tuple[str, str, Half | None, str]:
    try:
        number = UUID(message_id)
    except ValueError:
        raise unable(f"{message_id!r} is not a message id, which is a UUID.") from None
    for alias in outbox_databases():
        try:
            with connect(alias) as connection:
                ensure_fit(alias, connection)
                message = find(connection, number)
        except OutboxError as error:
            raise unable(error) from error
        except psycopg.Error as error:
            trouble = "refuses a statement" if is_refusal(error) else "cannot be reached"
            raise unable(f"Database {alias!r} {trouble}: {error}") from error
        if message is not None:
            return *message, alias
    searched = ", ".join(outbox_databases()) or "none"
    raise unable(f"No message {number} in the databases with an outbox ({searched}).")


def _as_text(message_id: str, topic: str, state: str, half: Half | None, given: Answer) -> str:
    lines = [f"{given.resolution}: {given.reason}", f"message {message_id} of topic {topic}, {state}"]
    if half is not None:
        lines.append(f"half message {half.half_id or 'not decided'}, token {half.token}")
        lines.append(f"the row it is about: {given.about}")
    return "\n".join(map(one_line, lines))


def _as_json(message_id: str, topic: str, state: str, half: Half | None, given: Answer) -> str:
    return json.dumps(
        {
            "message_id": message_id,
            "topic": topic,
            "state": state,
            "half_id": half and half.half_id,
            "token": half and half.token,
            "answer": given.resolution,
            "reason": given.reason,
            "about": given.about,
        }
    )
