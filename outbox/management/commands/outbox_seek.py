"""Move a consumer group to another position in its topics: print a table of the moves, ask for a confirmation, then move it."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, Literal

import msgspec
import psycopg
from django.core.management.base import BaseCommand

from outbox import conf
from outbox.brokers.base import GroupPosition
from outbox.brokers.capabilities import Seeks
from outbox.consuming.owners import set_owner
from outbox.consuming.register import group as find_group
from outbox.errors import ConfigurationError, OutboxError
from outbox.logs import get_logger
from outbox.management.acts import actor, confirm
from outbox.management.exits import unable
from outbox.management.tables import table
from outbox.management.times import time

logger = get_logger(__name__)

WARNING = (
    "Messages that are skipped are never delivered to the group. Messages that are repeated are dropped if the inbox still has "
    "their rows (RETENTION); otherwise they are handled again."
)


class Command(BaseCommand):
    help = (
        "Let a consumer group continue at another position in its topics, after a table and a confirmation. Stop its consumers "
        "first. Deferred messages stay, except that one of an unordered topic is handled, even if it is held or a dead letter, "
        "when the broker delivers it again. Exit code: 0 moved, 1 the group is there already, 2 refused, or the broker cannot be "
        "reached."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("group", metavar="GROUP", help="the group's name")
        parser.add_argument(
            "--to",
            required=True,
            type=_position,
            metavar="WHERE",
            help="first: the first message that the broker has; last: after the last message; or the first message stored since "
            "a time: 30m, 2h or 7d ago, or ISO 8601",
        )
        parser.add_argument("--topic", action="append", metavar="NAME", help="only in this topic; may be repeated (default: all)")
        parser.add_argument("--no-input", action="store_true", help="move the group without a confirmation")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        name, moved = options["group"], list[GroupPosition]()
        try:
            for alias, topics in _topics(name, options["topic"]).items():
                moved += self._seek(name, alias, topics, options)
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error
        if options["json"]:
            self.stdout.write(json.dumps({"group": name, "moved": msgspec.to_builtins(moved)}))
        elif moved:
            self.stdout.write(f"{_as_table(moved)}\n\nMoved.")
        else:
            self.stdout.write(f"Group {name!r} is there already.")
        if not moved:
            raise SystemExit(1)

    def _seek(self, name: str, alias: str, topics: Sequence[str], options: dict[str, Any]) -> list[GroupPosition]:
        def ask(positions: Sequence[GroupPosition]) -> None:
            if not options["no_input"]:
                confirm(f"{_as_table(positions)}\n\n{WARNING}")

        with closing(conf.make_broker(alias)) as broker:
            seeks = Seeks.of(broker)
            set_owner(seeks, name, find_group(name).using)
            moved = seeks.seek(name, topics, options["to"], confirm=ask)
        if moved:
            logger.warning("Group %r was moved to %s in %s by %s.", name, options["to"], ", ".join(topics), actor("outbox_seek"))
        return moved


def _position(text: str) -> datetime | Literal["first", "last"]:
    match text:
        case "first" | "last":
            return text
    return time(text)


_position.__name__ = "position"  # for argparse's error: invalid position value


def _topics(name: str, only: Sequence[str] | None) -> dict[str, list[str]]:
    """
    Return the topics of a group by broker.

    Raises:
        ConfigurationError: there is no such group, it has no handler for a topic in `only`, or a broker cannot move groups.
    """
    group = find_group(name)
    if unknown := set(only or ()) - set(group.topics):
        raise ConfigurationError(
            f"Group {name!r} has no handler for topic {', '.join(map(repr, sorted(unknown)))}.",
            hint=f"Choices are: {', '.join(group.topics)}.",
        )
    topics_by_broker = {
        alias: [topic for topic in group.topics_of(alias) if topic in (only or group.topics)] for alias in group.brokers
    }
    for alias, topics in topics_by_broker.items():
        if topics and not Seeks.has(conf.broker_class(alias)):
            raise ConfigurationError(
                f"Broker {alias!r}, which has topic {topics[0]!r}, cannot move a group.",
                hint="Only groups on Kafka can be moved. Choose topics with --topic.",
            )
    return {alias: topics for alias, topics in topics_by_broker.items() if topics}


def _as_table(positions: Sequence[GroupPosition]) -> str:
    # `ahead`: how many messages the target is ahead of the current position, which skips them; if negative, they are repeated.
    rows = [
        [position.topic, position.queue, position.pos, position.wanted, max(0, position.ahead), max(0, -position.ahead)]
        for position in positions
    ]
    return table(["topic", "queue", "position", "target", "skipped", "repeated"], rows)
