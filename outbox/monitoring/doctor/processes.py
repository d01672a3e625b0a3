"""Check that each target has a relay, and each consumer group a consumer."""

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

Live = set[tuple[str, str, str]]


def check() -> Iterator[Finding]:
    """Check the heartbeats of relays and consumers."""
    live: dict[str, Live] = {alias: found for alias in database.outbox_databases() if (found := _read(alias)) is not None}
    for target in relay_targets():
        if target.database in live:
            yield _relay(f"relay of {target}", ("relay", target.broker, "") in live[target.database])
    by_beat = {str(argument) for entry in beat_entries(CONSUME) for argument in entry.get("args") or ()}
    for group in groups().values():
        for alias in group.brokers:
            if group.using in live and group.name not in by_beat:
                yield _consumer(group.name, alias, ("consumer", alias, group.name) in live[group.using])


def _relay(subject: str, is_live: bool) -> Finding:
    if is_live:
        return Finding(Level.OK, subject, "sends heartbeats")
    text = f"has sent no heartbeat in the last {SILENT_AFTER.total_seconds():.0f} s: nothing is sent"
    return Finding(Level.WARNING, subject, text, "Start outbox_relay, or a Celery worker with beat.")


def _consumer(group: str, alias: str, is_live: bool) -> Finding:
    subject = f"consumer of group {group!r}, broker {alias!r}"
    if is_live:
        return Finding(Level.OK, subject, "sends heartbeats")
    text = f"has sent no heartbeat in the last {SILENT_AFTER.total_seconds():.0f} s"
    return Finding(Level.WARNING, subject, text, f"Start outbox_consume --group {group}, or beat_schedule(consume=[...]).")


def _read(alias: str) -> Live | None:
    """Return what processes with a recent heartbeat do; None if the database cannot be reached, which databases.py reports."""
    try:
        with database.connect(alias, application_name="outbox doctor", connect_timeout=CONNECT_SECONDS) as connection:
            return {one.does for one in read_processes(connection) if not one.is_silent}
    except psycopg.Error:
        return None
