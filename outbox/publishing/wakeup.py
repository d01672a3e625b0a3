"""
Start a relay with a Celery task (a wakeup) after a commit. If the wakeup is lost, the sweep, a periodic task, finds the tickets
about a second later.

A separate thread sends wakeups, so that a request neither waits for Celery's broker nor fails with it. Each process sends a
wakeup at most every `PAUSE_SECONDS`; commits in between share the next one. A wakeup is sent even if a long-running relay runs,
which the NOTIFY of the publish has woken already; the task then finds nothing and ends. A project that has only long-running
relays sets `OUTBOX["CELERY_WAKEUP"] = False`. If a process ends right after its commit, the wakeup may be lost.

While many tasks wait in the queue, no wakeup is sent: without a worker that takes them, Redis would keep all of them forever.
The sweep, or a waiting wakeup that has not expired, finds the messages. All tasks of the queue are counted, since servers cannot
count wakeups only; the limit leaves room for a few other tasks, such as the maintenance.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from django.db import connections, transaction

from outbox import conf, database
from outbox.logs import error_text, get_logger, log_fields

TASK = "outbox.tasks.relay"
PAUSE_SECONDS = 0.05
CROWDED_SECONDS = 60.0  # if a queue has had too many tasks for this time, a warning is logged
MAX_SAMPLE_SECONDS = 10.0  # an older sample of the queue says nothing about the time since then
MIN_CROWD = 10  # no wakeup is sent if the queue has this many tasks, and two for each pair of broker and database
BACKOFF_SECONDS = 1.0  # the pause after a failure; by then the sweep has found the messages
EXPIRES_SECONDS = 10  # workers drop wakeups that are older

logger = get_logger(__name__)


Wakeup = tuple[str, str]
"""A wakeup: the database and the broker whose messages wait for a relay."""


def wake_after_commit(database: str, broker: str) -> None:
    """Send one wakeup when the open transaction commits, however often this function is called in it."""
    if not conf.settings().celery_wakeup:
        return
    wakeup = _after_commit((database, broker))
    # A registered hook is removed only if its savepoint is rolled back; messages inside that savepoint are rolled back, too.
    if all(entry[1] is not wakeup for entry in connections[database].run_on_commit):
        transaction.on_commit(wakeup, using=database, robust=True)


@cache
def _after_commit(wakeup: Wakeup) -> Callable[[], None]:
    """
    Return the on_commit hook of a wakeup, the same object at each call.

    It is a function and no other callable, because Django logs the `__qualname__` of a hook that fails.
    """

    def add_wakeup() -> None:
        sender.add(wakeup)

    return add_wakeup


def count_waiting(connection: Any, queue: str) -> int:
    """
    Return how many tasks wait in a queue; 0 if it does not exist, or the transport does not count.

    Args:
        connection: a connection of kombu to Celery's server.
    """
    with connection.channel() as channel:
        try:
            declared = channel.queue_declare(queue, passive=True)
        except connection.channel_errors:
            return 0
    return int(declared.message_count or 0)


class WakeupSender:
    """
    Sends wakeups in a thread that starts with the first wakeup.

    Args:
        sent: how many wakeups were sent since the process started.
        failed: how many could not be sent. Each failure is logged, and so is the first success after failures.
        spared: how many were not sent because many tasks waited in the queue.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.failed = 0
        self.spared = 0
        self._is_failing = False
        self._crowded_since = self._last_crowded_at = float("-inf")  # monotonic times of samples with too many tasks
        self._waiting: set[Wakeup] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, wakeup: Wakeup) -> None:
        """Send a wakeup soon."""
        with self._changed:
            self._waiting.add(wakeup)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="outbox-wakeup", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                wakeups, self._waiting = self._waiting, set()
            outcomes = [self._send(wakeup) for wakeup in wakeups]
            time.sleep(PAUSE_SECONDS if all(outcomes) else BACKOFF_SECONDS)

    def _send(self, wakeup: Wakeup) -> bool:
        database, broker = wakeup
        try:
            from celery import current_app  # imported here, so that publish() does not import Celery

            if self._is_crowded(current_app):
                self.spared += 1
                return True
            current_app.send_task(
                TASK,
                kwargs={"database": database, "broker": broker},
                queue=conf.settings().celery_queue,
                expires=EXPIRES_SECONDS,
                ignore_result=True,
                retry=False,
            )
        except Exception as error:  # transports raise errors of many types
            logger.warning(
                "Wakeups cannot be sent to Celery's broker (CELERY_BROKER_URL): %s. No message is lost: long-running relays are "
                "not affected, and Celery's sweep finds the messages. If all relays are long-running, set "
                'OUTBOX["CELERY_WAKEUP"] = False.',
                error_text(error),
                extra=log_fields(database=database, broker=broker),
            )
            self._is_failing = True
            self.failed += 1
            return False
        if self._is_failing:
            logger.info("Wakeups are sent again.", extra=log_fields(database=database, broker=broker))
        self._is_failing = False
        self.sent += 1
        return True

    def _is_crowded(self, app: Any) -> bool:
        """Return whether the queue has too many tasks to send a wakeup; log a warning if it has had them for CROWDED_SECONDS."""
        queue = conf.settings().celery_queue
        with app.pool.acquire(block=True) as connection:
            waiting = count_waiting(connection, queue)
        brokers = {topic.broker for topic in conf.settings().topics.values()}
        now, last_crowded_at = time.monotonic(), self._last_crowded_at
        if waiting < max(MIN_CROWD, 2 * len(brokers) * len(database.outbox_databases())):
            self._last_crowded_at = float("-inf")
            return False
        if now - last_crowded_at > MAX_SAMPLE_SECONDS:
            self._crowded_since = now
        self._last_crowded_at = now
        if now - self._crowded_since >= CROWDED_SECONDS:
            logger.warning(
                "%s tasks wait in Celery's queue %r, and there were too many during the last minute, so no wakeups are sent. "
                "Messages wait for the sweep. Start workers for this queue, or route other tasks to another queue. If all relays "
                'are long-running, set OUTBOX["CELERY_WAKEUP"] = False.',
                *(waiting, queue),
            )
        return True


sender = WakeupSender()


def _replace_sender() -> None:
    """Replace the sender in a forked child, where the parent's thread does not run and its lock may be held."""
    global sender
    sender = WakeupSender()


os.register_at_fork(after_in_child=_replace_sender)
