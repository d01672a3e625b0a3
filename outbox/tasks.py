"""
Celery tasks: a nudge relays one post at once, beat's sweep relays whatever no nudge reported.

Celery closes Django's connections around each task and may fork at any time; so each task opens what it needs, and
nothing of it survives the task; but for the checker of a broker that asks by itself, which stays with its process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
from celery import shared_task
from django.db import InterfaceError, OperationalError

from outbox import conf
from outbox.archive import archive_due
from outbox.audit_runs.run import run_for_beat
from outbox.check_back.ask import in_process
from outbox.check_back.checker import brokers_that_ask, listen_in_this_process
from outbox.check_back.loop import CheckLoop, brokers_to_ask_for
from outbox.consumer.gaps import find_gaps
from outbox.consumer.register import group as find_group
from outbox.consumer.register import groups
from outbox.consumer.run import Worker
from outbox.errors import AuditRunning, BrokerUnavailable, LaneNotHeld, MonitorFailed, NotMigrated
from outbox.monitor import run_monitor
from outbox.relay import host
from outbox.relay.upkeep import keep_up, prune_brokers

logger = logging.getLogger(__name__)

# A project's time limits for its tasks (`task_time_limit`) are made for tasks of seconds, and would end these, which wait for
# Spark, in the middle. The audit has a limit of its own; archive and monitor take the time that they take.
AS_LONG_AS_IT_TAKES = 30 * 24 * 3600

EXPECTED = (psycopg.OperationalError, psycopg.InterfaceError, OperationalError, InterfaceError, BrokerUnavailable, MonitorFailed)


@shared_task(name="outbox.tasks.relay", ignore_result=True)
def relay(database: str = "default", broker: str = "default") -> None:
    """Relay what waits at one post; stay a moment, since one nudge stands for all commits of that moment."""
    settings = conf.settings().relay
    _listen(host.Post(database, broker))
    _try(host.visit, host.Post(database, broker), note="celery", at_most=settings.task_time, linger=host.LINGER)


@shared_task(name="outbox.tasks.sweep", ignore_result=True)
def sweep() -> None:
    """Relay what waits anywhere, settle what was left behind, and ask for brokers that do not ask by themselves."""
    posts = host.posts()
    for alias in brokers_to_ask_for({post.broker for post in posts}):
        with closing(CheckLoop(alias, posts[0].database)) as loop:
            _try(loop.turn)
    for post in posts:
        _listen(post)
        at_most = conf.settings().relay.task_time / len(posts)
        _try(host.visit, post, note="celery", at_most=at_most, linger=host.NO_LINGER)


@shared_task(name="outbox.tasks.upkeep", ignore_result=True)
def upkeep() -> None:
    """Make days ahead, prune, and look for numbers that never came."""
    posts = host.posts()
    for database in sorted({post.database for post in posts}):
        _try(keep_up, database)
    _try(prune_brokers, {post.broker for post in posts})
    for group in groups().values():
        _try(find_gaps, group)


@shared_task(name="outbox.tasks.audit", ignore_result=True, time_limit=AS_LONG_AS_IT_TAKES, soft_time_limit=AS_LONG_AS_IT_TAKES)
def audit(at_most: float = 3600.0, archived: bool = False) -> None:
    """Audit each database, for so many seconds at most; Spark runs in a process of its own, and ends with this one."""
    for database in sorted({post.database for post in host.posts()}):
        _try(run_for_beat, database, at_most=timedelta(seconds=at_most), archived=archived)


@shared_task(name="outbox.tasks.archive", ignore_result=True, time_limit=AS_LONG_AS_IT_TAKES, soft_time_limit=AS_LONG_AS_IT_TAKES)
def archive() -> None:
    """Archive what is due in each database; Spark runs in a process of its own, and whoever stops it stops nothing for good."""
    for database in sorted({post.database for post in host.posts()}):
        _try(archive_due, database)


@shared_task(name="outbox.tasks.consume", ignore_result=True)
def consume(group: str) -> None:
    """Hand what waits for a consumer group to its handlers, where no resident consumer does; beat calls it again."""
    chosen = find_group(group)
    for alias in chosen.brokers:
        at_most = conf.settings().consumer.task_time / len(chosen.brokers)
        with closing(Worker(chosen, alias)) as worker:
            worker.run(until_idle=True, seconds=at_most.total_seconds())


@shared_task(name="outbox.tasks.monitor", ignore_result=True, time_limit=AS_LONG_AS_IT_TAKES, soft_time_limit=AS_LONG_AS_IT_TAKES)
def monitor(checkpoint: str, database: str = "default") -> None:
    """Have the monitor count what was written since the last time, in a process of its own: no JVM stays in the worker."""
    _try(run_monitor, database, checkpoint, say=logger.info)


def _listen(post: host.Post) -> None:
    """Who sends half messages answers for them, too."""
    for alias in brokers_that_ask({post.broker}):
        _try(listen_in_this_process, alias, in_process(post.database, asked_by="rocketmq"))


def _try(step: Callable[..., object], *args: Any, **options: Any) -> None:
    """Do a step; what is no fault of ours is a line in the log, and the next task does the step again."""
    try:
        step(*args, **options)
    except (LaneNotHeld, AuditRunning) as error:
        logger.debug("%s", error)  # others are at work
    except NotMigrated as error:
        logger.info("%s", error)
    except EXPECTED as error:
        logger.warning("%s does not succeed now: %s", step.__qualname__, str(error).strip())
