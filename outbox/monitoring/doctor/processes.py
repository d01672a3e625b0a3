"""Check that each target has a relay, and each consumer group a consumer; and name what `outbox_status` says needs attention."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg

from outbox import database
from outbox.checks.celery import CONSUME, beat_entries
from outbox.consuming.register import groups
from outbox.database.heartbeats import SILENT_AFTER
from outbox.errors import NotMigrated
from outbox.monitoring.attention import Kind
from outbox.monitoring.connection import connected
from outbox.monitoring.doctor.finding import Finding, Level
from outbox.monitoring.status import Status, read_status
from outbox.relay.hosts import relay_targets

STATEMENT_SECONDS = 30


def check() -> Iterator[Finding]:
    """Check the heartbeats of relays and consumers, then yield what needs attention."""
    read: dict[str, Status] = {alias: found for alias in database.outbox_databases() if (found := _read(alias)) is not None}
    for target in relay_targets():
        if target.database in read:
            yield from _relay(f"relay of {target}", _errors(read[target.database], "relay", target.broker, ""))
    said = [(Kind.NO_RELAY, f"broker {target.broker!r}") for target in relay_targets()]
    by_beat = {str(argument) for entry in beat_entries(CONSUME) for argument in entry.get("args") or ()}
    for group in groups().values():
        for alias in group.brokers:
            if group.using in read and group.name not in by_beat:
                said.append((Kind.NO_CONSUMER, f"group {group.name!r}"))
                yield from _consumer(group.name, alias, _errors(read[group.using], "consumer", alias, group.name))
    for status in read.values():
        others = [one for one in status.attention if (one.kind, one.subject) not in said]
        yield from (Finding(Level.WARNING, one.subject, one.text, one.step) for one in others)


def _errors(status: Status, *does: str) -> list[str]:
    """Return for each live process what keeps it from its work; "" if nothing does."""
    return [one.error for one in status.processes if one.does == does and not one.is_silent]


def _relay(subject: str, live: list[str]) -> Iterator[Finding]:
    if not live:
        text = f"has sent no heartbeat in the last {SILENT_AFTER.total_seconds():.0f} s: nothing is sent"
        yield Finding(Level.WARNING, subject, text, "Start outbox_relay, or a Celery worker with beat.")
    elif not all(live):  # the others are among what needs attention
        yield Finding(Level.OK, subject, "sends heartbeats")


def _consumer(group: str, alias: str, live: list[str]) -> Iterator[Finding]:
    subject = f"consumer of group {group!r}, broker {alias!r}"
    if not live:
        text = f"has sent no heartbeat in the last {SILENT_AFTER.total_seconds():.0f} s"
        yield Finding(Level.WARNING, subject, text, f"Start outbox_consume --group {group}, or beat_schedule(consume=[...]).")
    elif not all(live):
        yield Finding(Level.OK, subject, "sends heartbeats")


def _read(alias: str) -> Status | None:
    """Return the status of a database; None if it cannot be read, which databases.py reports."""
    try:
        with connected(alias, "outbox doctor", statement_seconds=STATEMENT_SECONDS) as connection:
            return read_status(connection, alias)
    except (NotMigrated, psycopg.Error):
        return None
