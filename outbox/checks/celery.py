"""
Check the project's Celery app, if the outbox uses it.

This module does not import Celery: a project with a Celery app has imported Celery already, and a project without one gets no
warnings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution

from outbox.checks.decorators import check
from outbox.checks.settings import known_settings
from outbox.consuming.register import groups, known_groups

SWEEP = "outbox.tasks.sweep"
CONSUME = "outbox.tasks.consume"
FALLBACK = "default"  # the name of the app that Celery creates if the project has none

OR_NO_WAKEUPS = 'If all relays are long-running (outbox_relay), set OUTBOX["CELERY_WAKEUP"] = False.'


@check()
def check_beat() -> Iterable[CheckMessage]:
    """
    W030: Wakeups are sent to Celery, and its beat has no entry for the sweep, or one with another queue than the wakeups.

    A wakeup may be lost; then the sweep finds the messages. Set `CELERY_BEAT_SCHEDULE = beat_schedule()`, from `outbox.schedule`.
    If all relays are long-running, set `OUTBOX["CELERY_WAKEUP"] = False`. Schedulers that keep their entries in a database are
    not checked.
    """
    for app in wakeup_app():
        if "PersistentScheduler" not in str(app.conf.beat_scheduler):
            continue
        entries = beat_entries(SWEEP)
        if not entries:
            yield Caution(
                f"Celery's beat has no entry for {SWEEP}: a message whose wakeup is lost waits for the next wakeup.",
                hint=f"Set CELERY_BEAT_SCHEDULE = beat_schedule(), from outbox.schedule. {OR_NO_WAKEUPS}",
                id="outbox.W030",
            )
        wanted = known_settings().celery_queue
        for queue in {entry.get("options", {}).get("queue", wanted) for entry in entries} - {wanted}:
            yield Caution(
                f"Celery's beat sends the sweep to the queue {queue!r}, but wakeups go to {wanted!r}.",
                hint=f'Write beat_schedule(queue={wanted!r}), or OUTBOX["CELERY_QUEUE"] = {queue!r}.',
                id="outbox.W030",
            )


@check()
def check_queue() -> Iterable[CheckMessage]:
    """
    W071: Wakeups go to a queue that Celery's `task_queues` do not have, and `task_create_missing_queues` is off.

    Celery then refuses to send them, and what its beat sends to this queue, too. Add the queue to `CELERY_TASK_QUEUES`. If all
    relays are long-running, set `OUTBOX["CELERY_WAKEUP"] = False`.
    """
    queue = known_settings().celery_queue
    return [
        Caution(
            f"Celery's task_queues have no queue {queue!r}, and task_create_missing_queues is off, so no wakeup can be sent.",
            hint=f"Add kombu.Queue({queue!r}) to CELERY_TASK_QUEUES. {OR_NO_WAKEUPS}",
            id="outbox.W071",
        )
        for app in wakeup_app()
        if not app.conf.task_create_missing_queues and queue not in app.amqp.queues
    ]


@check()
def check_eager() -> Iterable[CheckMessage]:
    """
    W031: Celery's `task_always_eager` is on, and wakeups are sent.

    Wakeups are sent by task name, and Celery never runs such tasks eagerly, so they need Celery's server. In settings with
    `task_always_eager`, also set `OUTBOX["CELERY_WAKEUP"] = False`.
    """
    return [
        Caution(
            "Celery's task_always_eager is on, but the outbox still sends wakeups to Celery's server.",
            hint='In settings with task_always_eager, also set OUTBOX["CELERY_WAKEUP"] = False.',
            id="outbox.W031",
        )
        for app in wakeup_app()
        if app.conf.task_always_eager
    ]


@check()
def check_consumed_groups() -> Iterable[CheckMessage]:
    """
    E058: Celery's beat consumes for a group that has no `@consumer`.

    Correct the name in `beat_schedule(consume=[...])`, or define the consumer in consumers.py of an installed app.
    """
    names = sorted({str(name) for entry in beat_entries(CONSUME) for name in entry.get("args", ())[:1]} - set(groups()))
    text = "Celery's beat consumes for the group {!r}, which has no @consumer."
    return [Error(text.format(name), hint=known_groups(), id="outbox.E058") for name in names]


def wakeup_app() -> Iterator[Any]:
    """Yield the project's Celery app, if it has one and wakeups are sent to it."""
    settings = known_settings()
    if settings.celery_wakeup and settings.topics:
        yield from _app()


def beat_entries(task: str) -> list[Any]:
    """Return the entries of Celery's beat for a task; [] if the project has no Celery app."""
    return [entry for app in _app() for entry in app.conf.beat_schedule.values() if entry["task"] == task]


def seconds_between(schedule: Any) -> float:
    """Return the interval of a beat entry in seconds; a crontab or solar schedule counts as a minute."""
    if isinstance(schedule, timedelta):
        return schedule.total_seconds()
    return float(schedule) if isinstance(schedule, int | float) else 60.0


def _app() -> Iterator[Any]:
    """Yield the project's Celery app, if it has one."""
    celery: Any = sys.modules.get("celery")
    if celery is not None and celery.current_app.main != FALLBACK:
        yield celery.current_app
