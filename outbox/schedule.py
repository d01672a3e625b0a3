"""
The entries that the outbox needs in the schedule of Celery's beat.

In settings, besides the project's own entries::

    from outbox.schedule import beat_schedule

    CELERY_BEAT_SCHEDULE = beat_schedule()

Two beats at once do no harm, because every task here may run any number of times, also concurrently.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

# Tasks that no worker takes expire, so that they do not pile up. The minimum is large enough for clocks that differ: a worker
# whose clock is ahead of beat's by more than the expiry drops each task.
MIN_EXPIRY = timedelta(seconds=10)

CONSUME_EVERY = timedelta(seconds=1)


def beat_schedule(
    *,
    sweep: timedelta = timedelta(seconds=1),
    maintenance: timedelta = timedelta(hours=1),
    consume: Iterable[str] = (),
    queue: str = "outbox",
) -> dict[str, dict[str, Any]]:
    """
    Return entries for Celery's `beat_schedule`: the sweep, the hourly maintenance, and the given consumer groups.

    Args:
        sweep: the interval of the sweep, which is how long a message may wait if its wakeup is lost.
        maintenance: the interval of the maintenance.
        consume: consumer groups for which a Celery task receives messages each second; none if `outbox_consume` runs.
        queue: the queue of these tasks; use the same as `OUTBOX["CELERY_QUEUE"]`.
    """
    if isinstance(consume, str):
        raise TypeError(f"consume takes a list of consumer groups: beat_schedule(consume=[{consume!r}]).")
    return {
        "outbox-sweep": _entry("outbox.tasks.sweep", sweep, queue),
        "outbox-maintenance": _entry("outbox.tasks.maintenance", maintenance, queue),
        **{f"outbox-consume-{group}": _entry("outbox.tasks.consume", CONSUME_EVERY, queue, group) for group in consume},
    }


def _entry(task: str, every: timedelta, queue: str, *arguments: str) -> dict[str, Any]:
    """Return an entry of Celery's `beat_schedule`."""
    expires = max(every, MIN_EXPIRY).total_seconds()
    options = {"expires": expires, "queue": queue, "ignore_result": True}
    return {"task": task, "schedule": every, "args": arguments, "options": options}
