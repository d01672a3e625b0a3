"""Processes that have sent a heartbeat: relays, consumers, checkers, recorders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from psycopg.rows import class_row

from outbox import conf
from outbox.checks.celery import CONSUME, SWEEP, beat_entries, seconds_between
from outbox.database import Connection
from outbox.database.heartbeats import BY_CELERY, SILENT_AFTER

PROCESSES = """
SELECT kind, host, pid, broker, consumer_group, lane, breaker, note,
    extract(epoch FROM clock_timestamp() - beat_at)::float8 AS silent_seconds,
    extract(epoch FROM clock_timestamp() - started_at)::float8 AS age_seconds
FROM outbox_process ORDER BY kind, broker, consumer_group, beat_at DESC, host, pid
"""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """
    A process that sent its last heartbeat `silent_seconds` ago, and its first one `age_seconds` ago.

    Args:
        beats_within: seconds after which the next heartbeat is missed.
    """

    kind: str
    host: str
    pid: int
    broker: str
    consumer_group: str
    lane: int | None
    breaker: str
    note: str
    silent_seconds: float
    age_seconds: float
    beats_within: float = SILENT_AFTER.total_seconds()

    @property
    def does(self) -> tuple[str, str, str]:
        """What it does: kind, broker, group."""
        return self.kind, self.broker, self.consumer_group

    @property
    def name(self) -> str:
        """Where it runs."""
        return f"{self.host}:{self.pid}"

    @property
    def is_silent(self) -> bool:
        """Whether it should have sent a heartbeat since."""
        return self.silent_seconds > self.beats_within


def read_processes(connection: Connection) -> list[ProcessStatus]:
    """Read all processes that have not left; those that do the same together, the newest heartbeat first."""
    found = connection.cursor(row_factory=class_row(ProcessStatus)).execute(PROCESSES).fetchall()
    return [replace(one, beats_within=_beats_within(one)) if one.note == BY_CELERY else one for one in found]


def _beats_within(process: ProcessStatus) -> float:
    """
    Return after how many seconds a process of Celery's counts as missing: after two of beat's calls without a heartbeat.

    A task goes from broker to broker, so where there are several another one may have all of its time first.
    """
    settings = conf.settings()
    task, takes = (SWEEP, settings.relay.task_time) if process.kind == "relay" else (CONSUME, settings.consumer.task_time)
    arguments = (process.consumer_group,) if process.consumer_group else ()
    entries = [entry for entry in beat_entries(task) if tuple(entry.get("args") or ()) == arguments]
    every = max((seconds_between(entry["schedule"]) for entry in entries), default=0.0)
    is_shared = len({topic.broker for topic in settings.topics.values()}) > 1
    return SILENT_AFTER.total_seconds() + 2 * every + takes.total_seconds() * is_shared


def is_replaced(silent: ProcessStatus, processes: Sequence[ProcessStatus]) -> bool:
    """
    Return whether another process has taken over what a silent one did: it began after the last heartbeat.

    Celery gives a process its next task, or not: any other one that lives does instead.
    """
    return any(
        one.does == silent.does
        and not one.is_silent
        and (one.age_seconds <= silent.silent_seconds or silent.note == one.note == BY_CELERY)
        for one in processes
    )
