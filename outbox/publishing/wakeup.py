"""
Wake a relay with a Celery message after a commit. The message may be lost: the sweep finds the tickets a second later.

A separate thread sends it, so that a request neither waits for Celery's broker nor fails with it. Each process sends at most
one per `PAUSE_SECONDS`; commits in between share the next one. It is sent even where a long-running relay runs, which the NOTIFY
of the publish has woken already; the task then finds nothing and ends. A project that runs long-running relays only sets
`OUTBOX["CELERY_WAKEUP"] = False`. A process that ends right after its commit may lose the wakeup.

While many tasks wait in the queue, none is sent: where no worker takes them, Redis would keep each of them for ever. The sweep
finds the messages, or a wakeup that waits and has not expired. All tasks of the queue are counted, since servers count no others;
the limit is such that a few of other kinds, such as the maintenance, do not keep wakeups back.
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
UNTAKEN_SECONDS = 60.0  # many tasks that wait for longer are logged
LOOK_AGAIN_SECONDS = 10.0  # an older sample of the queue is stale
LEAST_WAITING = 10  # tasks in the queue, before no wakeup is sent; or two for each wakeup, if that is more
BACK_OFF_SECONDS = 1.0  # after a failure; by then the sweep has found the messages
EXPIRES_SECONDS = 10  # workers drop an older wakeup

logger = get_logger(__name__)


Wakeup = tuple[str, str]
"""A wakeup for relays of a database and a broker."""


def wake_after_commit(database: str, broker: str) -> None:
    """Send a wakeup when the open transaction commits: one, however often this is called in it."""
    if not conf.settings().celery_wakeup:
        return
    wakeup = _after_commit((database, broker))
    # A hook that is still registered is dropped only with a savepoint that rolls the message back, too.
    if all(entry[1] is not wakeup for entry in connections[database].run_on_commit):
        transaction.on_commit(wakeup, using=database, robust=True)


@cache
def _after_commit(wakeup: Wakeup) -> Callable[[], None]:
    """Return the on_commit hook of a wakeup, always the same function. (Django cannot log the failure of other callables.)"""

    def hand_over() -> None:
        sender.add(wakeup)

    return hand_over


def count_waiting(connection: Any, queue: str) -> int:
    """
    Return how many tasks wait in a queue; 0 if it does not exist, or the transport does not count.

    Args:
        connection: kombu's, to Celery's server.
    """
    with connection.channel() as channel:
        try:
            declared = channel.queue_declare(queue, passive=True)
        except connection.channel_errors:
            return 0
    return int(declared.message_count or 0)


class WakeupSender:
    """
    Sends wakeups from a thread that starts with the first one.

    Args:
        sent, failed: how many, since the process started. Failures are logged, and when they end.
        spared: how many were not sent, since many tasks waited.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.failed = 0
        self.spared = 0
        self._is_failing = False
        self._untaken_since = self._looked_at = float("-inf")
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
            time.sleep(PAUSE_SECONDS if all(outcomes) else BACK_OFF_SECONDS)

    def _send(self, wakeup: Wakeup) -> bool:
        database, broker = wakeup
        try:
            from celery import current_app  # here, so that publish() does not import it

            if self._is_untaken(current_app):
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
        except Exception as error:  # whatever a transport raises
            logger.warning(
                "Wakeups cannot be sent to Celery's broker (CELERY_BROKER_URL): %s. No message is lost: long-running relays are "
                "not affected, and Celery's sweep finds the messages. Where all relays are long-running, set "
                'OUTBOX["CELERY_WAKEUP"] = False.',
                error_text(error),
                extra=log_fields(database=database, broker=broker),
            )
            self._is_failing = True
            self.failed += 1
            return False
        if self._is_failing:
            logger.info("Wakeups are sent again", extra=log_fields(database=database, broker=broker))
        self._is_failing = False
        self.sent += 1
        return True

    def _is_untaken(self, app: Any) -> bool:
        """Return whether too many tasks wait in the queue to send a wakeup; log it if each look shows that for a minute."""
        queue = conf.settings().celery_queue
        with app.pool.acquire(block=True) as connection:
            waiting = count_waiting(connection, queue)
        brokers = {topic.broker for topic in conf.settings().topics.values()}
        now, looked_at = time.monotonic(), self._looked_at
        if waiting < max(LEAST_WAITING, 2 * len(brokers) * len(database.outbox_databases())):
            self._looked_at = float("-inf")
            return False
        if now - looked_at > LOOK_AGAIN_SECONDS:
            self._untaken_since = now
        self._looked_at = now
        if now - self._untaken_since >= UNTAKEN_SECONDS:
            logger.warning(
                "%s tasks wait in Celery's queue %r, and as many for a minute, so no wakeups are sent. Messages wait for the "
                "sweep. Start workers for this queue, or route other tasks to another one; or, where all relays are "
                'long-running, set OUTBOX["CELERY_WAKEUP"] = False.',
                *(waiting, queue),
            )
        return True


sender = WakeupSender()


def _start_afresh() -> None:
    """Replace the parent's thread and lock: they do not work in a forked child."""
    global sender
    sender = WakeupSender()


os.register_at_fork(after_in_child=_start_afresh)
