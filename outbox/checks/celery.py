"""
Celery, where the project uses it for relays.

Nothing here imports it: a project that has a Celery app has imported it, and one without is told nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.core.checks import CheckMessage
from django.core.checks import Warning as Caution

from outbox.checks.settings import known_settings

SWEEP = "outbox.tasks.sweep"
CONSUME = "outbox.tasks.consume"
FALLBACK = "default"  # what Celery calls the app that it makes where the project has none

OR_NO_NUDGES = 'Where all relays are resident (outbox_relay), set OUTBOX["NUDGE"] = False.'


def check_beat(**kwargs: Any) -> list[CheckMessage]:
    """
    W030: Celery is nudged, and its beat has no entry for the sweep, or one on another queue than nudges go to.

    A nudge may be lost; the sweep finds what it was about. `CELERY_BEAT_SCHEDULE = beat_schedule()`, from
    `outbox.schedule`. Where all relays are resident, set `OUTBOX["NUDGE"] = False`. A scheduler that keeps its entries in
    a database is not looked at.
    """
    return [problem for app in nudged_app() for problem in _problems_of_beat(app)]


def check_eager(**kwargs: Any) -> list[CheckMessage]:
    """
    W031: Celery's `task_always_eager` is on, and nudges are sent.

    Nudges go by the task's name, which Celery never runs eagerly: they reach for a server. Set `OUTBOX["NUDGE"] = False`
    beside it.
    """
    return [
        Caution(
            "Celery's task_always_eager is on, and the outbox sends nudges to its server all the same.",
            hint='Set OUTBOX["NUDGE"] = False where tasks run eagerly.',
            id="outbox.W031",
        )
        for app in nudged_app()
        if app.conf.task_always_eager
    ]


def nudged_app() -> Iterator[Any]:
    """Return the project's Celery app, if it has one and nudges are sent to it."""
    settings = known_settings()
    if settings.nudge and settings.topics:
        yield from _app()


def beat_entries(task: str) -> list[Any]:
    """Return the entries of Celery's beat for a task; none where the project has no Celery app."""
    return [entry for app in _app() for entry in app.conf.beat_schedule.values() if entry["task"] == task]


def seconds_between(schedule: Any) -> float:
    """Return how often an entry of beat comes, in seconds; of a schedule by the clock, a minute."""
    if isinstance(schedule, timedelta):
        return schedule.total_seconds()
    return float(schedule) if isinstance(schedule, int | float) else 60.0


def _app() -> Iterator[Any]:
    celery: Any = sys.modules.get("celery")
    if celery is not None and celery.current_app.main != FALLBACK:
        yield celery.current_app


def _problems_of_beat(app: Any) -> Iterator[CheckMessage]:
    if "PersistentScheduler" not in str(app.conf.beat_scheduler):
        return
    entries = beat_entries(SWEEP)
    if not entries:
        yield Caution(
            f"Celery's beat has no entry for {SWEEP}: a message whose nudge is lost waits for the next one.",
            hint=f"CELERY_BEAT_SCHEDULE = beat_schedule(), from outbox.schedule. {OR_NO_NUDGES}",
            id="outbox.W030",
        )
    wanted = known_settings().celery_queue
    for queue in {entry.get("options", {}).get("queue", wanted) for entry in entries} - {wanted}:
        yield Caution(
            f"Celery's beat sends the sweep to the queue {queue!r}, and nudges go to {wanted!r}.",
            hint=f'Write beat_schedule(queue={wanted!r}), or OUTBOX["CELERY_QUEUE"] = {queue!r}.',
            id="outbox.W030",
        )
