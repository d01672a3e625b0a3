"""
Celery tasks. A wakeup starts `relay`. Beat's schedule starts all other tasks; one of them, `sweep`, relays messages whose wakeup
was lost.

Celery closes Django's connections around each task and may fork at any time. So each task opens the connections that it needs,
and closes them at its end. Only the checker of a broker that sends check-backs itself stays open until its process ends.

A worker that shuts down waits for its tasks without notifying them: `worker_shutting_down` is sent in the main process only, and
the children of a prefork pool get no signal. So the main process sets a flag in memory that it shares with its forked children.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar

from celery import shared_task, signals

from outbox import conf
from outbox.check_backs.loop import CheckLoop, brokers_to_ask_for, listen_in_this_process
from outbox.consuming.deferred_housekeeping import tidy
from outbox.consuming.gaps import find_gaps
from outbox.consuming.register import group as find_group
from outbox.consuming.register import groups
from outbox.consuming.worker import Worker
from outbox.database.heartbeats import BY_CELERY
from outbox.relay import hosts
from outbox.relay.loops import try_step
from outbox.relay.maintenance import maintain, prune_brokers
from outbox.shutdown import ShutdownWatch

T = TypeVar("T")

RETRY_SECONDS = 60

_main_process = os.getpid()
_is_shutting_down = mmap.mmap(-1, 1)  # one byte that is shared with forked children


@signals.worker_init.connect
def _on_worker_init(**_: object) -> None:
    _is_shutting_down[0] = 0


@signals.worker_shutting_down.connect
def _on_shutting_down(**_: object) -> None:
    _is_shutting_down[0] = 1


@contextmanager
def _watch_for_shutdown() -> Iterator[ShutdownWatch]:
    """
    Yield a watch that stops the task when its worker shuts down.

    Only a child of a prefork pool may exit in the middle of a call, because in other pools the process runs other tasks, too.
    """
    task = threading.current_thread()
    watch = ShutdownWatch(lambda: _is_shutting_down[0], lambda: [task], may_exit=os.getpid() != _main_process)
    watch.start()
    try:
        yield watch
    finally:
        watch.close()


@shared_task(name="outbox.tasks.relay", ignore_result=True)
def relay(database: str = "default", broker: str = "default") -> None:
    """Relay messages of one database and broker until none comes for `IDLE_TIMEOUT`, since later commits may share a wakeup."""
    settings = conf.settings().relay
    asks_producers = conf.broker_has(broker, "AsksProducers")  # raises if settings have no such broker, so that the task fails
    with _watch_for_shutdown() as shutdown:
        if asks_producers:
            try_step(listen_in_this_process, broker, database)
        try_step(
            hosts.run_once,
            hosts.RelayTarget(database, broker),
            note=BY_CELERY,
            at_most=settings.task_time,
            idle_timeout=hosts.IDLE_TIMEOUT,
            shutdown=shutdown,
        )


@shared_task(name="outbox.tasks.sweep", ignore_result=True)
def sweep() -> None:
    """Relay the messages of all databases and brokers, settle unanswered commits, and run the check loops of brokers."""
    targets = hosts.relay_targets()
    with _watch_for_shutdown() as shutdown:
        for alias in brokers_to_ask_for({target.broker for target in targets}):
            with closing(CheckLoop(alias, targets[0].database)) as loop:
                try_step(loop.turn)
        for target in targets:
            try_step(listen_in_this_process, target.broker, target.database)
            at_most = conf.settings().relay.task_time / len(targets)
            limits = {"at_most": at_most, "idle_timeout": hosts.NO_IDLE_TIMEOUT}
            try_step(hosts.run_once, target, note=BY_CELERY, **limits, shutdown=shutdown, is_sweep=True)


@shared_task(name="outbox.tasks.maintenance", bind=True, ignore_result=True, max_retries=None)
def maintenance(self: Any) -> None:
    """
    Create the partitions of coming days, tidy deferred messages, prune, and look for gaps in the numbers that groups have
    received.

    While a step fails, the task is repeated each minute. A repetition expires when beat sends the next regular task.
    """
    targets = hosts.relay_targets()
    with _watch_for_shutdown() as shutdown:
        databases = sorted({target.database for target in targets})
        succeeded = [_unless_shutting_down(shutdown, step, alias) for step in (tidy, maintain) for alias in databases]
        succeeded.append(_unless_shutting_down(shutdown, prune_brokers, {target.broker for target in targets}))
        succeeded += [_unless_shutting_down(shutdown, find_gaps, group) for group in groups().values()]
        is_in_worker = not (self.request.called_directly or self.request.is_eager)
        has_to_repeat = is_in_worker and not (all(succeeded) or shutdown.requested.is_set())
    if has_to_repeat:
        raise self.retry(countdown=RETRY_SECONDS)


@shared_task(name="outbox.tasks.consume", ignore_result=True)
def consume(group: str) -> None:
    """Handle waiting messages of a consumer group. Beat starts this task each second, in place of a long-running consumer."""
    consumer_group = find_group(group)
    with _watch_for_shutdown() as shutdown:
        for alias in consumer_group.brokers:
            at_most = conf.settings().consumer.task_time / len(consumer_group.brokers)
            with closing(Worker(consumer_group, alias, stop=shutdown.requested, is_task=True)) as worker:
                shutdown.on_request(worker.stop)
                worker.run(until_idle=True, seconds=at_most.total_seconds())


def _unless_shutting_down(shutdown: ShutdownWatch, step: Callable[[T], object], subject: T) -> bool:
    """Run a step, unless the worker shuts down, since then another worker will run it. Return whether it ran and succeeded."""
    return not shutdown.requested.is_set() and try_step(step, subject)
