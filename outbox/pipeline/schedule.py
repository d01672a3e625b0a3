"""
The entries of Celery's beat for the pipeline.

In settings, beside those of the outbox::

    CELERY_BEAT_SCHEDULE = beat_schedule() | pipeline_schedule(audit=crontab(hour=3, minute=0))
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from outbox.schedule import entry

# An audit that no worker took in an hour is left to the next night.
EXPIRES_SECONDS = 3600.0


def pipeline_schedule(
    *,
    audit: Any = None,
    audit_at_most: timedelta = timedelta(hours=1),
    audit_archived: bool = False,
    archive: Any = None,
    monitor: Mapping[str, str] | None = None,
    monitor_every: timedelta = timedelta(minutes=5),
    queue: str = "outbox",
) -> dict[str, dict[str, Any]]:
    """
    Return the entries that audit, archive and monitor need. They need the extra `spark`, and Java where the worker is.

    Args:
        audit: when to audit, as Celery has it: `crontab(hour=3, minute=0)`, or a timedelta; None: never.
        audit_at_most: an audit that takes longer is ended.
        audit_archived: also audit what is in the lake of `OUTBOX["PIPELINE"]["ARCHIVE"]`; it takes longer.
        archive: when to archive what is due, likewise. It has no time limit: a day takes the time that it takes.
        monitor: databases whose monitor runs by beat -> the folder of its checkpoint, on the worker's machine. Each time it
            counts what there is, in micro-batches, and ends.
        monitor_every: how often; Spark takes some ten seconds to start.
        queue: these tasks wait for Spark, and keep a worker's process to themselves meanwhile; with a queue of their own
            nothing else waits behind them.
    """
    entries = {}
    if audit is not None:
        args = (audit_at_most.total_seconds(), *([True] if audit_archived else []))
        entries["outbox-audit"] = _nightly("outbox.pipeline.tasks.audit", audit, queue, *args)
    if archive is not None:
        entries["outbox-archive"] = _nightly("outbox.pipeline.tasks.archive", archive, queue)
    for database, checkpoint in (monitor or {}).items():
        task = "outbox.pipeline.tasks.monitor"
        entries[f"outbox-monitor-{database}"] = entry(task, monitor_every, queue, checkpoint, database)
    return entries


def _nightly(task: str, when: Any, queue: str, *args: float | bool) -> dict[str, Any]:
    options = {"expires": EXPIRES_SECONDS, "queue": queue, "ignore_result": True}
    return {"task": task, "schedule": when, "args": args, "options": options}
