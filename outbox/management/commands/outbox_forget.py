"""Drop the messages that wait for a consumer group whose code was removed."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import psycopg
from django.core.management.base import BaseCommand

from outbox import conf
from outbox.brokers.capabilities import Receives
from outbox.consuming import subscriptions
from outbox.consuming.owners import set_owner
from outbox.consuming.register import groups
from outbox.errors import OutboxError
from outbox.logs import get_logger
from outbox.management.acts import actor, confirm
from outbox.management.exits import unable
from outbox.management.tables import table
from outbox.monitoring.connection import connected
from outbox.monitoring.processes import read_processes
from outbox.monitoring.status import read_status
from outbox.monitoring.text import age
from outbox.relay.hosts import databases

logger = get_logger(__name__)

Dropped = dict[str, Any]
"""The messages of a group in a topic: database, broker and topic, and the numbers of waiting and deferred messages."""

FINAL = "This cannot be undone: these messages can never be delivered to the group again."


class Command(BaseCommand):
    help = (
        "Drop the waiting and deferred messages of a consumer group whose code was removed, after a list and a confirmation. "
        "Messages of topics that the group still has a handler for are kept. Exit code: 0 dropped, 1 nothing to drop, 2 refused, "
        "or a database or broker cannot be reached. Processes of the group must have been stopped."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("group", metavar="GROUP", help="the group's name")
        parser.add_argument("--topic", action="append", metavar="NAME", help="only of this topic; may be repeated (default: all)")
        parser.add_argument("--no-input", action="store_true", help="drop without a confirmation")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")

    def handle(self, **options: Any) -> None:
        group, only = options["group"], options["topic"]
        done: list[Dropped] = []
        try:
            dropped = list(_find(group, only))
            for alias in {entry["broker"] for entry in dropped}:
                _forget(group, alias, [])  # raises an error if the broker cannot drop messages, before any are dropped
            if dropped and not options["no_input"]:
                confirm(f"{_as_table(dropped)}\n\n{FINAL}")
                _require_stopped(group, [entry["topic"] for entry in dropped])
            for entry in dropped:
                _drop(group, entry)
                done.append(entry)
        except (OutboxError, psycopg.Error) as error:
            if done:
                self.stderr.write(f"{_as_table(done)}\n\nThese were dropped, the others were not.")
            raise unable(error) from error
        if options["json"]:
            self.stdout.write(json.dumps({"group": group, "dropped": dropped}))
        elif dropped:
            self.stdout.write(f"{_as_table(dropped)}\n\nDropped.")
        else:
            where = f" in topic {', '.join(map(repr, only))}" if only else ""
            self.stdout.write(f"Nothing waits for group {group!r}{where}.")
        if not dropped:
            raise SystemExit(1)


def _find(group: str, only: Sequence[str] | None) -> Iterator[Dropped]:
    """
    Yield the messages to drop, by database, broker and topic.

    Raises:
        CommandError: the group has a handler for a topic in `only`, or one of its consumers has not been stopped.
    """
    handled = groups()[group].topics if group in groups() else []
    if refused := [topic for topic in only or () if topic in handled]:
        raise unable(
            f"Group {group!r} has a handler for topic {refused[0]!r}. Remove it, and deploy, before you drop its messages."
        )
    for alias in databases():
        with connected(alias, "outbox forget") as connection:
            status = read_status(connection, alias)
        for progress in (progress for progress in status.groups if progress.consumer_group == group):
            if progress.trouble:
                text = f"Broker {progress.broker!r} did not say how many messages wait for group {group!r}: {progress.trouble}"
                raise unable(text)
            topics = [topic for topic in {*progress.waiting, *progress.deferred} if topic not in handled]
            chosen = sorted(topic for topic in topics if only is None or topic in only)
            _require_stopped(group, chosen)
            for topic in chosen:
                count = progress.deferred.get(topic)
                deferred = count.waiting + count.held + count.dead if count else 0
                key = {"database": alias, "broker": progress.broker, "topic": topic}
                yield key | {"waiting": progress.waiting.get(topic, 0), "deferred": deferred}


def _require_stopped(group: str, topics: Sequence[str]) -> None:
    """
    Require that no consumer of the group reads one of the topics.

    Raises:
        CommandError: one has sent heartbeats in the last hour and has not been stopped cleanly.
    """
    for alias in databases():
        with connected(alias, "outbox forget") as connection:
            processes = read_processes(connection)
        for process in processes:
            taken = sorted({*topics} & {*process.topics})
            if (process.kind, process.consumer_group) == ("consumer", group) and taken:
                raise unable(
                    f"A consumer of group {group!r} takes topic {taken[0]!r}: process {process.name}, whose last heartbeat came "
                    f"{age(process.silent_seconds)} ago. Stop it, and all others of that release, before you drop its messages. "
                    "A process that was killed counts for an hour."
                )


def _drop(group: str, dropped: Dropped) -> None:
    """Drop a group's messages of one topic, at the broker and in the database, and log it."""
    alias, topic = dropped["database"], dropped["topic"]
    _forget(group, dropped["broker"], [topic], alias)
    with connected(alias, "outbox forget", statement_seconds=None) as connection:
        subscriptions.forget_group(connection, group, topic)
    text = "Group %r was forgotten in topic %r by %s: %s waiting and %s deferred messages were dropped."
    logger.warning(text, group, topic, actor("outbox_forget"), dropped["waiting"], dropped["deferred"])


def _forget(group: str, alias: str, topics: Sequence[str], using: str | None = None) -> None:
    """Drop the messages that a broker keeps for a group in these topics; `using`: the database whose outbox owns the group."""
    with closing(Receives.of(conf.make_broker(alias))) as broker:
        if using is not None:
            set_owner(broker, group, using)
        broker.forget_group(group, topics)


def _as_table(entries: Sequence[Dropped]) -> str:
    return table(list(entries[0]), [list(entry.values()) for entry in entries])
