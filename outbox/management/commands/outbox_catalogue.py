"""Show the catalogue of messages."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import psycopg
from django.core.management.base import BaseCommand

from outbox.catalogue.asyncapi import document
from outbox.catalogue.entries import TopicEntry, TypeEntry, read_entries
from outbox.catalogue.traffic import Traffic, read_traffic
from outbox.errors import OutboxError
from outbox.management.exits import unable
from outbox.management.tables import table
from outbox.monitoring.connection import PAGE_SECONDS, connected
from outbox.relay.hosts import databases


class Command(BaseCommand):
    help = (
        "Show which messages are sent, who handles them, what is promised about each topic, and what became of the newest ones. "
        "Exit code: 0 shown, 1 a topic of a type or a handler is not in the settings, or a type cannot be described, 2 a "
        "database cannot be reached, or an AsyncAPI document cannot be made."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", action="append", metavar="ALIAS", help="may be repeated (default: all)")
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="print one line of JSON, with schemas and examples")
        form.add_argument(
            "--asyncapi", action="store_true", help="print an AsyncAPI 3.0 document, for other languages; it reads no database"
        )

    def handle(self, **options: Any) -> None:
        if options["asyncapi"] and options["database"]:
            raise unable("--database is not for --asyncapi.")
        try:
            topics = read_entries()
            described = document(topics) if options["asyncapi"] else None
            traffic = {} if described else {alias: _read(alias) for alias in databases(options["database"])}
        except (OutboxError, psycopg.Error) as error:
            raise unable(error) from error
        if described:
            self.stdout.write(json.dumps(described, indent=2))
        elif options["json"]:
            shown = msgspec.to_builtins({"topics": topics, "newest": traffic}, builtin_types=(datetime,))
            self.stdout.write(json.dumps(shown, default=str))
        else:
            self.stdout.write("\n\n".join(_as_text(topic, traffic) for topic in topics) or "There is no topic.")
        if not all(topic.broker for topic in topics) or any(kind.trouble for topic in topics for kind in topic.types):
            raise SystemExit(1)


def _read(alias: str) -> list[Traffic]:
    with connected(alias, "outbox catalogue", statement_seconds=PAGE_SECONDS) as connection:
        return read_traffic(connection)


def _as_text(topic: TopicEntry, traffic: Mapping[str, Sequence[Traffic]]) -> str:
    where = f", of type {topic.type}, on broker {topic.broker!r}" if topic.broker else ", which is not in settings"
    parts = [f"Topic {topic.name!r}{where}"]
    if promise := topic.promise:
        parts += [promise.published, promise.order, promise.duplicates, promise.check_backs]
    parts += map(_type, topic.types)
    handlers = [
        [handler.group, handler.takes or "all others", handler.name, ", ".join(handler.tags), handler.retry]
        for handler in topic.handlers
    ]
    if handlers:
        parts.append(table(["group", "handles", "handler", "tags", "retries"], handlers))
    else:
        parts.append("Nobody handles its messages here.")
    newest = []
    for alias, rows in traffic.items():
        for row in (row for row in rows if row.topic == topic.name):
            last = f"{row.last_at:%Y-%m-%d %H:%M:%S}" if row.last_at else ""
            newest.append([alias, row.type or "?", row.consumer_group or "published", row.messages, row.failed, last])
    if newest:
        parts.append(table(["database", "newest of type", "group", "messages", "failed once", "last"], newest))
    return "\n".join(parts)


def _type(kind: TypeEntry) -> str:
    upgrades = f", reads version {', '.join(map(str, kind.upgrades))}, too" if kind.upgrades else ""
    key = f", key {kind.key}" if kind.key else ""
    trouble = f"\n! {kind.trouble}" if kind.trouble else ""
    return f"{kind.name}, version {kind.version}{upgrades}{key}: {kind.location}{trouble}"
