"""Processes that have sent a heartbeat: relays, consumers, checkers, recorders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
from msgspec.structs import replace
from psycopg.rows import dict_row

from outbox import conf
from outbox.checks.celery import CONSUME, SWEEP, beat_entries, seconds_between
from outbox.consuming.register import groups
from outbox.database import Connection
from outbox.database.heartbeats import BY_CELERY, SILENT_AFTER, Handling

HANGS_AFTER = timedelta(minutes=1)
UNKNOWN_INTERVAL = timedelta(minutes=2)

# A subscription is a topic, a subject and a tag, joined by chr(31). Processes with the same work are in adjacent rows.
PROCESSES = """
SELECT kind, host, pid, broker, server, consumer_group, lane, breaker, note,
    ARRAY(SELECT DISTINCT split_part(one, chr(31), 1) FROM unnest(subscriptions) one ORDER BY 1) AS topics,
    refusals::text AS refusals, -- Django's connections do not decode JSON
    errors::text AS errors, handling::text AS handling,
    extract(epoch FROM clock_timestamp() - beat_at)::float8 AS silent_seconds,
    extract(epoch FROM clock_timestamp() - started_at)::float8 AS age_seconds
FROM outbox_process ORDER BY kind, broker, consumer_group, beat_at DESC, host, pid
"""


class ProcessStatus(msgspec.Struct, frozen=True):
    """
    A process that sent its last heartbeat `silent_seconds` ago, and its first one `age_seconds` ago.

    Args:
        errors: name of a loop -> its current error. While the loop that is named like `kind` has one, the process does no work.
        handling: of a consumer, the handler that has been running for the longest time, and its message.
        note: the kind of program that runs it: `BY_CELERY`, "long-running", …
        topics: the topics for which a consumer has handlers.
        server: the server that the settings of the process name for the broker; "" if it is not known.
        refusals: topic -> why a consumer cannot receive from it as configured.
        beats_within: seconds without a heartbeat after which the process counts as silent.
    """

    kind: str
    host: str
    pid: int
    broker: str
    server: str
    consumer_group: str
    lane: int | None
    breaker: str
    note: str
    errors: dict[str, str]
    handling: Handling | None
    topics: list[str]
    refusals: dict[str, str]
    silent_seconds: float
    age_seconds: float
    beats_within: float = SILENT_AFTER.total_seconds()

    @property
    def does(self) -> tuple[str, str, str]:
        """The work of the process: its kind, broker and consumer group."""
        return self.kind, self.broker, self.consumer_group

    @property
    def name(self) -> str:
        """Its host and process id."""
        return f"{self.host}:{self.pid}"

    @property
    def subject(self) -> str:
        """The subject of a finding about the process."""
        return f"group {self.consumer_group!r}" if self.consumer_group else f"broker {self.broker!r}"

    @property
    def error(self) -> str:
        """The error that keeps the process from its work; "" if there is none."""
        return self.errors.get(self.kind, "")

    @property
    def hangs(self) -> bool:
        """Whether a handler has been running for longer than both `HANGS_AFTER` and its time limit."""
        handling = self.handling
        return handling is not None and handling.seconds > max(HANGS_AFTER.total_seconds(), handling.limit_seconds or 0)

    @property
    def is_silent(self) -> bool:
        """Whether the next heartbeat of the process is overdue."""
        return self.silent_seconds > self.beats_within


def read_processes(connection: Connection) -> list[ProcessStatus]:
    """Return all processes that have not deregistered, grouped by their work, the newest heartbeat first."""
    rows = connection.cursor(row_factory=dict_row).execute(PROCESSES).fetchall()
    processes = [_process(row | {name: json.loads(row[name]) for name in ("refusals", "errors", "handling")}) for row in rows]
    return [
        replace(process, beats_within=_beats_within(process)) if process.note == BY_CELERY else process for process in processes
    ]


def _process(row: dict[str, Any]) -> ProcessStatus:
    running = row.pop("handling")
    return ProcessStatus(**row, handling=Handling(**running) if running else None)


def _beats_within(process: ProcessStatus) -> float:
    """
    Return the seconds without a heartbeat after which a process of Celery counts as silent.

    These are two intervals of beat, `SILENT_AFTER`, and with several brokers the maximum duration of a task, since a task serves
    one broker after the other.
    """
    settings = conf.settings()
    is_consumer = process.kind == "consumer"
    task, task_time = (CONSUME, settings.consumer.task_time) if is_consumer else (SWEEP, settings.relay.task_time)
    arguments = (process.consumer_group,) if process.consumer_group else ()
    entries = [entry for entry in beat_entries(task) if tuple(entry.get("args") or ()) == arguments]
    # The beat of another service may consume for the group, with a schedule that this process does not know.
    is_elsewhere = is_consumer and not (process.consumer_group in groups() and beat_entries(SWEEP))
    default_interval = UNKNOWN_INTERVAL.total_seconds() if is_elsewhere and not entries else 0.0
    interval = max((seconds_between(entry["schedule"]) for entry in entries), default=default_interval)
    has_several_brokers = len({topic.broker for topic in settings.topics.values()}) > 1
    return SILENT_AFTER.total_seconds() + 2 * interval + task_time.total_seconds() * has_several_brokers


def is_replaced(silent: ProcessStatus, processes: Sequence[ProcessStatus]) -> bool:
    """
    Return whether another process has replaced a silent one: it started after the last heartbeat of the silent one.

    Celery may give the next task to any of its processes, so any live process of Celery replaces a silent one.
    """
    return any(
        process.does == silent.does
        and not process.is_silent
        and (process.age_seconds <= silent.silent_seconds or silent.note == process.note == BY_CELERY)
        for process in processes
    )
