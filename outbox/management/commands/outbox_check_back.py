"""Answer a check-back about one message, as for a broker."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

import psycopg
from django.core.management.base import BaseCommand

from outbox.check_backs.answer import answer
from outbox.check_backs.resolve import Answer
from outbox.check_backs.sources import SourceMessage, connect, find
from outbox.database import ensure_fit, outbox_databases
from outbox.errors import OutboxError
from outbox.logs import one_line
from outbox.management.exits import unable
from outbox.message import UNKNOWN


class Command(BaseCommand):
    help = (
        "Print the answer to a check-back about one message. As for a broker, the answer is recorded, and a batch whose lease "
        "is over is taken back from its relay. Exit code: 0 COMMIT or ROLLBACK, 1 UNKNOWN, 2 there is no such message, or a "
        "database cannot be reached."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("message_id", metavar="MESSAGE_ID", help="id of the message")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, *, message_id: str, json: bool, **options: Any) -> None:
        answer, alias = _find(message_id)
        given = _ask(answer, alias)
        self.stdout.write(_as_json(message_id, answer, given) if json else _as_text(message_id, answer, given))
        if given.resolution is UNKNOWN:
            raise SystemExit(1)


def _find(message_id: str) -> tuple[SourceMessage, str]:
    try:
        number = UUID(message_id)
    except ValueError:
        raise unable(f"{message_id!r} is not a message id, which is a UUID.") from None
    for alias in outbox_databases():
        try:
            with connect(alias) as connection:
                ensure_fit(alias, connection)
                half = find(connection, number)
        except OutboxError as error:
            raise unable(error) from error
        except psycopg.Error as error:
            raise unable(f"Database {alias!r} cannot be reached: {error}") from error
        if half is not None:
            return half, alias
    searched = ", ".join(outbox_databases()) or "none"
    raise unable(f"No message {number} in the databases with an outbox ({searched}).")


def _ask(found: SourceMessage, alias: str) -> Answer:
    if found.half is None:
        return Answer(UNKNOWN, f"It has no half message that a broker could ask about; it is {found.state}.")
    return answer(found.half, asked_by="command", using=alias)


def _as_text(message_id: str, found: SourceMessage, given: Answer) -> str:
    lines = [f"{given.resolution}: {given.reason}", f"message {message_id} of topic {found.topic}, {found.state}"]
    if found.half is not None:
        lines.append(f"half message {found.half.half_id or 'not decided'}, token {found.half.token}")
        lines.append(f"the row it is about: {given.about}")
    return "\n".join(map(one_line, lines))


def _as_json(message_id: str, found: SourceMessage, given: Answer) -> str:
    return json.dumps(
        {
            "message_id": message_id,
            "topic": found.topic,
            "state": found.state,
            "half_id": found.half and found.half.half_id,
            "token": found.half and found.half.token,
            "answer": given.resolution,
            "reason": given.reason,
            "about": given.about,
        }
    )
