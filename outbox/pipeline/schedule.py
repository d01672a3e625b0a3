"""
The entries of Celery's beat for the pipeline.

In settings, beside those of the outbox::

    CELERY_BEAT_SCHEDULE = beat_schedule() | pipeline_schedule(audit=crontab(hour=3, minute=0))
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

# An audit that no worker took in an hour is left to the next night.
EXPIRES_SECONDS = 3600.0


def pipeline_schedule(
    *,
    audit: Any = None,
    audit_at_most: timedelta = timedelta(hours=1),
    audit_archived: bool = False,
    archive: Any = None,
    queue: str = "outbox",
) -> dict[str, dict[str, Any]]:
    """
    Return the entries that audit and archive need. They need the extra `spark`, and Java where the worker is.

    Args:
        audit: when to audit, as Celery has it: `crontab(hour=3, minute=0)`, or a timedelta; None: never.
        audit_at_most: an audit that takes longer is ended.
        audit_archived: also audit what is in the lake of `OUTBOX["PIPELINE"]["ARCHIVE"]`; it takes longer.
        archive: when to archive what is due, likewise. It has no time limit: a day takes the time that it takes.
        queue: these tasks wait for Spark, and keep a worker's process to themselves meanwhile; with a queue of their own
            nothing else waits behind them.
    """
    entries = {}
    if audit is not None:
        args = (audit_at_most.total_seconds(), *([True] if audit_archived else []))
        entries["outbox-audit"] = _nightly("outbox.pipeline.tasks.audit", audit, queue, *args)
    if archive is not None:
        entries["outbox-archive"] = _nightly("outbox.pipeline.tasks.archive", archive, queue)
    return entries


def _nightly(task: str, when: Any, queue: str, *args: float | bool) -> dict[str, Any]:
    options = {"expires": EXPIRES_SECONDS, "queue": queue, "ignore_result": True}
    return {"task": task, "schedule": when, "args": args, "options": options}
