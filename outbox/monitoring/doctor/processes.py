"""Processes: a relay for each target, consumers for each group, a checker where the broker asks by itself."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg

from outbox import database
from outbox.checks.celery import CONSUME, beat_entries
from outbox.consuming.register import groups
from outbox.database.heartbeats import SILENT_AFTER
from outbox.monitoring.doctor.databases import CONNECT_SECONDS
from outbox.monitoring.doctor.finding import Finding, Level
from outbox.monitoring.processes import read_processes
from outbox.relay.hosts import relay_targets

Heard = set[tuple[str, str, str]]


def examine() -> Iterator[Finding]:
    """Look at who has sent a heartbeat of late."""
    heard: dict[str, Heard] = {alias: found for alias in database.outbox_databases() if (found := _ask(alias)) is not None}
    for target in relay_targets():
        if target.database in heard:
            yield _relay(f"relay of {target}", ("relay", target.broker, "") in heard[target.database])
    by_beat = {str(argument) for entry in beat_entries(CONSUME) for argument in entry.get("args") or ()}
    for group in groups().values():
        for alias in group.brokers:
            if group.using in heard and group.name not in by_beat:
                yield _consumer(group.name, alias, ("consumer", alias, group.name) in heard[group.using])


def _relay(subject: str, is_heard: bool) -> Finding:
    if is_heard:
        return Finding(Level.OK, subject, "sends heartbeats")
    text = f"has sent no heartbeat in the last {SILENT_AFTER.total_seconds():.0f} s: nothing is sent"
    return Finding(Level.WARNING, subject, text, "Start outbox_relay, or a Celery worker with beat.")


def _consumer(group: str, alias: str, is_heard: bool) -> Finding:
    subject = f"consumer of group {group!r}, broker {alias!r}"
    if is_heard:
        return Finding(Level.OK, subject, "sends heartbeats")
    text = f"has sent no heartbeat in the last {SILENT_AFTER.total_seconds():.0f} s"
    return Finding(Level.WARNING, subject, text, f"Start outbox_consume --group {group}, or beat_schedule(consume=[...]).")


def _ask(alias: str) -> Heard | None:
    """Return who has; None where the database cannot be asked, which databases.py reports."""
    try:
        with database.connect(alias, application_name="outbox doctor", connect_timeout=CONNECT_SECONDS) as connection:
            return {one.does for one in read_processes(connection) if not one.is_silent}
    except psycopg.Error:
        return None
