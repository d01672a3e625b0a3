"""How the outbox stands."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import psycopg
from django.core.management.base import BaseCommand

from outbox import database
from outbox.consuming.backlog import Backlog, read_backlogs
from outbox.database.heartbeats import silence
from outbox.errors import OutboxError
from outbox.management.exits import unable
from outbox.management.tables import table
from outbox.monitoring.status import SILENT_AFTER, FailureStatus, Status, age, read_status
from outbox.relay.hosts import databases, ensure_fit


class Command(BaseCommand):
    help = (
        "Show what waits, what failed and who is at work. Exit code: 0 nothing needs a person, 1 something does, "
        "2 a database cannot be asked."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", action="append", metavar="ALIAS", help="may be repeated (default: all)")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")
        parser.add_argument(
            "--alive",
            choices=["relay", "consumer", "checker"],
            help="only say whether one on this host was heard of in the last 30 s, with exit code 1 if not: for probes",
        )

    def handle(self, **options: Any) -> None:
        if options["alive"]:
            self._probe(options["alive"], options["database"])
        else:
            self._show(**options)

    def _probe(self, kind: str, only: list[str] | None) -> None:
        try:
            found = [_silence(alias, kind) for alias in databases(only)]
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error
        shortest = min((seconds for seconds in found if seconds is not None), default=None)
        said = "never heard of" if shortest is None else f"heard of {age(shortest)} ago"
        self.stdout.write(f"The {kind} on this host was {said}.")
        if shortest is None or shortest > SILENT_AFTER.total_seconds():
            raise SystemExit(1)

    def _show(self, **options: Any) -> None:
        try:
            found = [_read(alias) for alias in databases(options["database"])]
            backlogs = read_backlogs()
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error
        if options["json"]:
            self.stdout.write(json.dumps({"databases": list(map(asdict, found)), "consumers": list(map(asdict, backlogs))}))
        else:
            self.stdout.write("\n\n".join([*map(_as_text, found), *_backlogs(backlogs)]))
        if any(status.concerns for status in found) or any(backlog.trouble for backlog in backlogs):
            raise SystemExit(1)


def _read(alias: str) -> Status:
    with database.connect(alias, application_name="outbox status") as connection:
        ensure_fit(alias, connection)
        return read_status(connection, alias)


def _silence(alias: str, kind: str) -> float | None:
    with database.connect(alias, application_name="outbox status") as connection:
        ensure_fit(alias, connection)
        return silence(connection, kind)


def _as_text(status: Status) -> str:
    parts = [
        f"Database {status.database!r}",
        table(
            ["topic", "broker", "type", "waiting", "oldest", "delayed", "released", "claimed", "prepared", "dead", ""],
            [
                [
                    *(topic.name, topic.broker, topic.type, topic.waiting, age(topic.oldest_seconds), topic.delayed),
                    *(topic.released, topic.claimed, topic.prepared, topic.dead, "paused" if topic.is_paused else ""),
                ]
                for topic in status.topics
            ],
        ),
        table(
            ["process", "host", "pid", "broker", "group", "lane", "breaker", "by", "heard of"],
            [
                [
                    *(process.kind, process.host, process.pid, process.broker, process.consumer_group, process.lane),
                    *(process.breaker, process.note, f"{age(process.silent_seconds)} ago"),
                ]
                for process in status.processes
            ],
        )
        if status.processes
        else "No process was heard of.",
        *([_failures(status.failures)] if status.failures else []),
        *([f"~ {risk}" for risk in status.risks]),
        "\n".join(f"! {concern}" for concern in status.concerns) or "Nothing needs a person.",
    ]
    return "\n\n".join(parts)


def _failures(failures: Sequence[FailureStatus]) -> str:
    return table(
        ["group", "topic", "failed deliveries in the last hour", "messages", "dead letters", "newest", "error"],
        [
            [
                *(failure.consumer_group, failure.topic, failure.deliveries, failure.messages, failure.dead_letters),
                *(f"{age(failure.newest_seconds)} ago", failure.error),
            ]
            for failure in failures
        ],
    )


def _backlogs(backlogs: Sequence[Backlog]) -> list[str]:
    asked = [one for one in backlogs if not one.trouble]
    parts = []
    if asked:
        rows = [[one.consumer_group, one.topic, one.broker, one.messages] for one in asked]
        parts.append(table(["consumer group", "topic", "broker", "waiting for it"], rows))
    troubles = [f"! Group {one.consumer_group!r}: {one.trouble}" for one in backlogs if one.trouble]
    return [*parts, "\n".join(troubles)] if troubles else parts
