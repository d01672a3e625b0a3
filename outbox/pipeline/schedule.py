"""
The entries of Celery's beat for the pipeline.

In settings, beside those of the outbox::

    CELERY_BEAT_SCHEDULE = beat_schedule() | pipeline_schedule(audit=crontab(hour=3, minute=0))
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

# A task that no worker has started within an hour is dropped; beat sends the next one as scheduled.
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
    Return the beat entries for audit and archive. Their worker needs the extra `spark`, and Java.

    Args:
        audit: when to run the audit, as a Celery schedule such as `crontab(hour=3, minute=0)` or a timedelta; None: never.
        audit_at_most: the time limit of an audit.
        audit_archived: also audit the lake in `OUTBOX["PIPELINE"]["ARCHIVE"]`, which takes longer.
        archive: when to archive the days that are due, as a Celery schedule; None: never. There is no time limit.
        queue: the queue of these tasks. Each task occupies a worker process while Spark runs, so use a separate queue if other
            tasks must not wait for them.
    """
    entries = {}
    if audit is not None:
        args = (audit_at_most.total_seconds(), *([True] if audit_archived else []))
        entries["outbox-audit"] = _entry("outbox.pipeline.tasks.audit", audit, queue, *args)
    if archive is not None:
        entries["outbox-archive"] = _entry("outbox.pipeline.tasks.archive", archive, queue)
    return entries


def _entry(task: str, when: Any, queue: str, *args: float | bool) -> dict[str, Any]:
    options = {"expires": EXPIRES_SECONDS, "queue": queue, "ignore_result": True}
    return {"task": task, "schedule": when, "args": args, "options": options}
