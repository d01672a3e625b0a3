"""
Wake a relay with a Celery message after a commit. The message may be lost: the sweep finds the tickets a second later.

A separate thread sends it, so that a request neither waits for Celery's broker nor fails with it. Each process sends at most
one per `PAUSE_SECONDS`; commits in between share the next one. It is sent even where a resident relay runs, which the NOTIFY
of the publish has woken already; the task then finds nothing and ends. A project that runs resident relays only sets
`OUTBOX["CELERY_WAKEUP"] = False`. A process that ends right after its commit may lose the wakeup.

While as many tasks wait in the queue as there are brokers, none is sent: a task that waits finds the messages as well, and where
no worker takes them, Redis would keep each of them for ever.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from django.db import connections, transaction

from outbox import conf
from outbox.logs import get_logger, log_fields

TASK = "outbox.tasks.relay"
PAUSE_SECONDS = 0.05
UNTAKEN_SECONDS = 60.0  # so long may no worker take a wakeup before the log says so
BACK_OFF_SECONDS = 1.0  # after a failure; by then the sweep has found the messages
EXPIRES_SECONDS = 10  # workers drop an older wakeup

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wakeup:
    """A wakeup for relays of a database and a broker."""

    database: str
    broker: str


def wake_after_commit(database: str, broker: str) -> None:
    """Send a wakeup when the open transaction commits: one, however often this is called in it."""
    if not conf.settings().celery_wakeup:
        return
    wakeup = _after_commit(Wakeup(database, broker))
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


class Sender:
    """
    Sends wakeups from a thread that starts with the first one.

    Args:
        sent, failed: how many, since the process started. Failures are logged, and when they end.
        spared: how many were not sent, since no worker has taken the ones before.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.failed = 0
        self.spared = 0
        self._is_failing = False
        self._untaken_since: float | None = None
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
        try:
            from celery import current_app  # here, so that publish() does not import it

            if self._is_untaken(current_app):
                self.spared += 1
                return True
            current_app.send_task(
                TASK,
                kwargs={"database": wakeup.database, "broker": wakeup.broker},
                queue=conf.settings().celery_queue,
                expires=EXPIRES_SECONDS,
                ignore_result=True,
                retry=False,
            )
        except Exception as error:  # whatever a transport raises
            logger.warning(
                "Wakeups cannot be sent to Celery: %r. No message is lost: resident relays are not affected, and Celery's "
                'sweep finds the messages. Where all relays are resident, set OUTBOX["CELERY_WAKEUP"] = False.',
                error,
                extra=log_fields(database=wakeup.database, broker=wakeup.broker),
            )
            self._is_failing = True
            self.failed += 1
            return False
        if self._is_failing:
            logger.info("Wakeups are sent again", extra=log_fields(database=wakeup.database, broker=wakeup.broker))
        self._is_failing = False
        self.sent += 1
        return True

    def _is_untaken(self, app: Any) -> bool:
        """Return whether as many tasks wait in the queue as there are brokers; log it if that lasts."""
        settings = conf.settings()
        with app.pool.acquire(block=True) as connection:
            waiting = count_waiting(connection, settings.celery_queue)
        if waiting < len({topic.broker for topic in settings.topics.values()}):
            self._untaken_since = None
            return False
        now = time.monotonic()
        self._untaken_since = self._untaken_since or now
        if now - self._untaken_since >= UNTAKEN_SECONDS:
            logger.warning(
                "No worker of Celery has taken a wakeup from the queue %r for a minute: %s wait, and no others are sent. "
                'Start a worker for this queue; or, where all relays are resident, set OUTBOX["CELERY_WAKEUP"] = False.',
                *(settings.celery_queue, waiting),
            )
        return True


sender = Sender()


def _start_afresh() -> None:
    """Replace the parent's thread and lock: they do not work in a forked child."""
    global sender
    sender = Sender()


os.register_at_fork(after_in_child=_start_afresh)
