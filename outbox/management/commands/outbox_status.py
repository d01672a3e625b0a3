"""Show the state of the outbox."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import starmap
from typing import Any

import msgspec
import psycopg
from django.core.management.base import BaseCommand

from outbox.database.heartbeats import seconds_since_heartbeat
from outbox.errors import OutboxError
from outbox.findings import Finding
from outbox.logs import one_line
from outbox.management.exits import unable
from outbox.management.found import NONE_FOUND, NOT_FOUND, as_text, find_in
from outbox.management.tables import table
from outbox.management.times import time
from outbox.monitoring.attention import find_attention
from outbox.monitoring.connection import connected
from outbox.monitoring.find import parse
from outbox.monitoring.groups import GroupStatus
from outbox.monitoring.processes import ProcessStatus, is_replaced
from outbox.monitoring.status import FailureStatus, Status, read_status
from outbox.monitoring.text import age
from outbox.relay.hosts import databases

PROBE_SECONDS = 30.0  # longer than one step keeps a live process from sending heartbeats


class Command(BaseCommand):
    help = (
        "Show waiting messages, failures, running processes, and what needs attention. Exit code: 0 nothing needs attention, "
        "1 something needs attention, 2 a database cannot be reached."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", action="append", metavar="ALIAS", help="may be repeated (default: all)")
        parser.add_argument("--json", action="store_true", help="print one line of JSON")
        parser.add_argument(
            "--alive",
            choices=["relay", "consumer", "checker"],
            help="for probes: only check whether such a process on this host has sent a heartbeat in the last 30 s; exit code 1 "
            "if none has",
        )

        parser.add_argument(
            "--message",
            type=_words,
            metavar="WHAT",
            help="only show messages, and the reason why each waits: the message with this id; otherwise messages with this key "
            "or about this row (shop.order:4711); otherwise messages with this field in their body (invoice=536365, "
            "customer.id=7); exit code 1 if no database has one",
        )
        parser.add_argument(
            "--since",
            type=time,
            metavar="TIME",
            help="with --message: only messages published since this time: 30m, 2h or 7d ago, or ISO 8601",
        )
        parser.add_argument("--until", type=time, metavar="TIME", help="with --message: only messages published before this time")

    def handle(self, **options: Any) -> None:
        if options["message"]:
            self._find(**options)
        elif options["since"] or options["until"]:
            raise unable("--since and --until can only be used with --message.")
        elif options["alive"]:
            self._probe(options["alive"], options["database"], as_json=options["json"])
        else:
            self._show(**options)

    def _probe(self, kind: str, only: list[str] | None, *, as_json: bool) -> None:
        try:
            silences = []
            for alias in databases(only):
                with connected(alias, "outbox status") as connection:
                    silences.append(seconds_since_heartbeat(connection, kind))
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error
        shortest = min((seconds for seconds in silences if seconds is not None), default=None)
        is_alive = shortest is not None and shortest <= PROBE_SECONDS
        sent = "no heartbeat" if shortest is None else f"its last heartbeat {age(shortest)} ago"
        as_dict = {"process": kind, "is_alive": is_alive, "silent_seconds": shortest}
        self.stdout.write(json.dumps(as_dict) if as_json else f"The {kind} on this host has sent {sent}.")
        if not is_alive:
            raise SystemExit(1)

    def _find(self, **options: Any) -> None:
        search, since, until = parse(options["message"]), options["since"], options["until"]
        if since and until and since >= until:
            raise unable(f"--since {since.isoformat()} is not before --until {until.isoformat()}.")
        try:
            results = [find_in(alias, search, since=since, until=until) for alias in databases(options["database"])]
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error
        has_any = any(result["messages"] for result in results)
        if options["json"]:
            self.stdout.write(json.dumps({"databases": results}, default=str))
        else:
            parts = [part for result in results for part in as_text(result)]
            self.stdout.write("\n\n".join(parts if has_any else [NOT_FOUND if parts else NONE_FOUND, *parts]))
        if not has_any:
            raise SystemExit(1)

    def _show(self, **options: Any) -> None:
        try:
            results = [_read(alias) for alias in databases(options["database"])]
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error
        if options["json"]:
            shown = [
                msgspec.to_builtins(status, builtin_types=(datetime, timedelta))
                | {"findings": [finding.as_dict() for finding in attention]}
                for status, attention in results
            ]
            self.stdout.write(json.dumps({"databases": shown}, default=str))
        else:
            self.stdout.write("\n\n".join(starmap(_as_text, results)))
        if any(attention for _, attention in results):
            raise SystemExit(1)


def _read(alias: str) -> tuple[Status, list[Finding]]:
    with connected(alias, "outbox status") as connection:
        status = read_status(connection, alias)
        return status, list(find_attention(connection, status))


def _words(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(text)
    return text


_words.__name__ = "message"  # argparse says: invalid message value


def _as_text(status: Status, attention: Sequence[Finding]) -> str:
    parts = [
        f"Database {status.database!r}",
        _topics(status),
        _processes(status.processes) if status.processes else "No process is running.",
        *([_groups(status.groups)] if status.groups else []),
        *([_failures(status.failures)] if status.failures else []),
        *([f"~ {risk}" for risk in status.risks]),
        "\n".join(["Needs attention:", *(f"! {one_line(finding.line)}" for finding in attention)])
        if attention
        else "Nothing needs attention.",
    ]
    return "\n\n".join(parts)


def _topics(status: Status) -> str:
    return table(
        ["topic", "broker", "type", "published", "waiting", "oldest", "delayed", "released", "claimed", "prepared", "dead", ""],
        [
            [
                *(
                    topic.name,
                    topic.broker,
                    topic.type,
                    status.promises[topic.name].how_often if topic.name in status.promises else "",
                ),
                *(topic.waiting, age(topic.oldest_seconds), topic.delayed),
                *(topic.released, topic.claimed, topic.prepared, topic.dead, topic.pause),
            ]
            for topic in status.topics
        ],
    )


def _processes(processes: Sequence[ProcessStatus]) -> str:
    shown = [process for process in processes if not (process.is_silent and is_replaced(process, processes))]
    rows = [
        [
            *(process.kind, process.host, process.pid, process.broker, process.consumer_group, process.lane),
            *(process.breaker, process.note, f"{age(process.silent_seconds)} ago"),
        ]
        for process in shown
    ]
    text = table(["process", "host", "pid", "broker", "group", "lane", "breaker", "by", "heartbeat"], rows)
    replaced = len(processes) - len(shown)
    return f"{text}\nSilent, and replaced by others: {replaced}." if replaced else text


def _groups(groups: Sequence[GroupStatus]) -> str:
    return table(
        [
            "group",
            "broker",
            "topic",
            "waiting",
            "deferred",
            "dead letters",
            "consumers",
            "handled per minute",
            "ignored per minute",
        ],
        [
            [
                *(group.consumer_group, group.broker, topic, "?" if group.trouble else group.waiting.get(topic, 0)),
                *((count.waiting + count.held, count.dead) if (count := group.deferred.get(topic)) else (0, 0)),
                *(group.consumers, round(group.progress[topic].per_minute), round(group.progress[topic].ignored_per_minute)),
            ]
            for group in groups
            for topic in group.topics
        ],
    )


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
