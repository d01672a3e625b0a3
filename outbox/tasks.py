"""
Celery tasks: `relay` runs on each wakeup, `sweep` relays messages whose wakeup was lost, the others run on beat's schedule.

Celery closes Django's connections around each task and may fork at any time. So each task opens what it needs and closes it
at its end. Only the checker of a broker that sends check-backs itself stays open as long as its process.

A worker that shuts down waits for its tasks without telling them: `worker_shutting_down` is sent in the main process only,
and the children of a prefork pool get no signal. So the main process sets a flag in memory that it shares with the children
that it forks.
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
_is_shutting_down = mmap.mmap(-1, 1)  # shared with the processes that this one forks


@signals.worker_init.connect
def _begin(**_: object) -> None:
    _is_shutting_down[0] = 0


@signals.worker_shutting_down.connect
def _shut_down(**_: object) -> None:
    _is_shutting_down[0] = 1


@contextmanager
def _watch_for_shutdown() -> Iterator[ShutdownWatch]:
    """
    Yield a watch that stops the task when its worker shuts down.

    Only a child of a prefork pool may exit in the middle of a call: in other pools the process runs other tasks, too.
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
    """Relay the messages of one target; stay a moment, since one wakeup stands for all commits of that moment."""
    settings = conf.settings().relay
    asks_producers = conf.broker_has(broker, "AsksProducers")  # the task fails where settings have no such broker
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
    """Relay the messages of all targets, settle open commits, and do the check-backs of brokers that send none."""
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
    Create the partitions of coming days, tidy deferred messages, prune, and look for gaps in what consumer groups have seen.

    It is repeated each minute while something fails. A repetition expires when beat's next one comes.
    """
    targets = hosts.relay_targets()
    with _watch_for_shutdown() as shutdown:
        databases = sorted({target.database for target in targets})
        done = [_unless_shutting_down(shutdown, step, alias) for step in (tidy, maintain) for alias in databases]
        done.append(_unless_shutting_down(shutdown, prune_brokers, {target.broker for target in targets}))
        done += [_unless_shutting_down(shutdown, find_gaps, group) for group in groups().values()]
        is_by_worker = not (self.request.called_directly or self.request.is_eager)
        is_to_repeat = is_by_worker and not (all(done) or shutdown.requested.is_set())
    if is_to_repeat:
        raise self.retry(countdown=RETRY_SECONDS)


@shared_task(name="outbox.tasks.consume", ignore_result=True)
def consume(group: str) -> None:
    """Handle the messages of a consumer group, where no long-running consumer does; beat calls it again."""
    chosen = find_group(group)
    with _watch_for_shutdown() as shutdown:
        for alias in chosen.brokers:
            at_most = conf.settings().consumer.task_time / len(chosen.brokers)
            with closing(Worker(chosen, alias, stop=shutdown.requested, is_task=True)) as worker:
                shutdown.on_request(worker.stop)
                worker.run(until_idle=True, seconds=at_most.total_seconds())


def _unless_shutting_down(shutdown: ShutdownWatch, step: Callable[[T], object], subject: T) -> bool:
    """Do a step, unless the worker shuts down: another worker will do it. Return whether it succeeded."""
    return not shutdown.requested.is_set() and try_step(step, subject)
