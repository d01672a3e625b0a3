"""
The beat schedule that the outbox needs.

In settings, beside the project's own entries::

    from outbox.schedule import beat_schedule

    CELERY_BEAT_SCHEDULE = beat_schedule()

Two beats at once do no harm: every task here may run any number of times, and side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

# Ticks that nobody took do not pile up. Not shorter: a worker whose clock goes ahead of beat's would drop every tick.
SHORTEST_EXPIRY = timedelta(seconds=10)

# An audit that no worker took in an hour is left to the next night.
AUDIT_EXPIRY = timedelta(hours=1)

CONSUME_EVERY = timedelta(seconds=1)


def beat_schedule(
    *,
    sweep: timedelta = timedelta(seconds=1),
    upkeep: timedelta = timedelta(hours=1),
    consume: Iterable[str] = (),
    audit: Any = None,
    audit_at_most: timedelta = timedelta(hours=1),
    audit_archived: bool = False,
    audit_queue: str = "",
    archive: Any = None,
    monitor: Mapping[str, str] | None = None,
    monitor_every: timedelta = timedelta(minutes=5),
    queue: str = "outbox",
) -> dict[str, dict[str, Any]]:
    """
    Give the entries of Celery's `beat_schedule` that relay what no nudge reported, and keep the tables in shape.

    Args:
        sweep: how long a message may wait when its nudge was lost.
        consume: consumer groups that Celery's workers serve, each second; none where `outbox_consume` runs.
        audit: when to audit, as Celery has it: `crontab(hour=3, minute=0)`, or a timedelta; None: never. Needs the extra `spark`
            and Java where the worker is.
        audit_at_most: an audit that takes longer is ended.
        audit_archived: audit what is in the lake of `OUTBOX["ARCHIVE"]`, too; give it time.
        audit_queue: the audit waits for Spark, and keeps a worker's process to itself meanwhile; a queue of its own keeps
            others from waiting behind it. By default `queue`. Archive and monitor go there, too.
        archive: when to archive what is due, likewise; None: never. It is not ended: a day takes the time that it takes.
        monitor: databases whose monitor runs by beat -> the folder of its checkpoint, on the worker's machine. Each time it
            counts what there is, in micro-batches, and ends.
        monitor_every: how often; Spark takes some ten seconds to start.
        queue: the same as `OUTBOX["CELERY_QUEUE"]`.
    """
    entries = {
        "outbox-sweep": _entry("outbox.tasks.sweep", sweep, queue),
        "outbox-upkeep": _entry("outbox.tasks.upkeep", upkeep, queue),
        **{f"outbox-consume-{group}": _entry("outbox.tasks.consume", CONSUME_EVERY, queue, group) for group in consume},
    }
    if audit is not None:
        options = {"expires": AUDIT_EXPIRY.total_seconds(), "queue": audit_queue or queue, "ignore_result": True}
        args = (audit_at_most.total_seconds(), *([True] if audit_archived else []))
        entries["outbox-audit"] = {"task": "outbox.tasks.audit", "schedule": audit, "args": args, "options": options}
    if archive is not None:
        options = {"expires": AUDIT_EXPIRY.total_seconds(), "queue": audit_queue or queue, "ignore_result": True}
        entries["outbox-archive"] = {"task": "outbox.tasks.archive", "schedule": archive, "args": (), "options": options}
    for database, checkpoint in (monitor or {}).items():
        name, to = f"outbox-monitor-{database}", audit_queue or queue
        entries[name] = _entry("outbox.tasks.monitor", monitor_every, to, checkpoint, database)
    return entries


def _entry(task: str, every: timedelta, queue: str, *arguments: str) -> dict[str, Any]:
    expires = max(every, SHORTEST_EXPIRY).total_seconds()
    options = {"expires": expires, "queue": queue, "ignore_result": True}
    return {"task": task, "schedule": every, "args": arguments, "options": options}
