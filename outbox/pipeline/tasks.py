"""Celery tasks of the pipeline. Each runs Spark in a child process, which ends when the worker ends."""

from __future__ import annotations

from datetime import timedelta

from celery import shared_task

from outbox.pipeline.archive import archive_due
from outbox.pipeline.runs import run_for_beat
from outbox.relay.hosts import relay_targets
from outbox.relay.loops import try_step

# Overrides a project's `task_time_limit`, which is usually meant for tasks of seconds and would kill these. The audit gets its
# time limit as an argument; the archive has none.
NO_LIMIT = 30 * 24 * 3600


@shared_task(name="outbox.pipeline.tasks.audit", ignore_result=True, time_limit=NO_LIMIT, soft_time_limit=NO_LIMIT)
def audit(at_most: float = 3600.0, archived: bool = False) -> None:
    """Audit each database. `at_most`: the time limit of each audit, in seconds."""
    for database in _databases():
        try_step(run_for_beat, database, at_most=timedelta(seconds=at_most), archived=archived)


@shared_task(name="outbox.pipeline.tasks.archive", ignore_result=True, time_limit=NO_LIMIT, soft_time_limit=NO_LIMIT)
def archive() -> None:
    """Archive the days of each database that are due. If an archive was stopped, this one continues it."""
    for database in _databases():
        try_step(archive_due, database)


def _databases() -> list[str]:
    return sorted({target.database for target in relay_targets()})
