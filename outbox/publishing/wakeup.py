"""
Wake a relay by a Celery message when a transaction has committed. It may be lost: the sweep finds the tickets a second later.

It is sent by a thread of its own, so that a request neither waits for Celery's broker nor fails with it, and not more
often than each `PAUSE_SECONDS` per process: what commits in between goes into the next one. It is sent although a resident
relay may be there, which the NOTIFY of the publish has woken long since; the task then finds nothing and ends. Whoever
runs resident relays only sets `OUTBOX["NUDGE"] = False`. A process that ends right after its commit may take the nudge
with it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from django.db import connections, transaction

from outbox import conf
from outbox.logs import get_logger, log_fields

TASK = "outbox.tasks.relay"
PAUSE_SECONDS = 0.05
BACK_OFF_SECONDS = 1.0  # after a failure; by then the sweep has found what was to be told
EXPIRES_SECONDS = 10  # workers drop a nudge that old

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Nudge:
    """A relay of this broker finds tickets in this database."""

    database: str
    broker: str


def wake_after_commit(database: str, broker: str) -> None:
    """Nudge when the open transaction commits: once, however often this is called in it."""
    if not conf.settings().nudge:
        return
    nudge = _after_commit(Nudge(database, broker))
    # One that is still there is dropped only with a savepoint that takes the message with it.
    if all(entry[1] is not nudge for entry in connections[database].run_on_commit):
        transaction.on_commit(nudge, using=database, robust=True)


@cache
def _after_commit(nudge: Nudge) -> Callable[[], None]:
    """Return what runs after the commit: one function for each nudge. (Of other callables Django cannot log the failure.)"""

    def hand_over() -> None:
        sender.add(nudge)

    return hand_over


class Sender:
    """
    Sends nudges from a thread that starts with the first one.

    Args:
        sent, failed: how many, since the process started. Failures are logged when they begin and when they end.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.failed = 0
        self._is_failing = False
        self._waiting: set[Nudge] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, nudge: Nudge) -> None:
        """Send a nudge soon."""
        with self._changed:
            self._waiting.add(nudge)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="outbox-nudge", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                nudges, self._waiting = self._waiting, set()
            outcomes = [self._send(nudge) for nudge in nudges]
            time.sleep(PAUSE_SECONDS if all(outcomes) else BACK_OFF_SECONDS)

    def _send(self, nudge: Nudge) -> bool:
        try:
            from celery import current_app  # here, so that publish() does not import it

            current_app.send_task(
                TASK,
                kwargs={"database": nudge.database, "broker": nudge.broker},
                queue=conf.settings().celery_queue,
                expires=EXPIRES_SECONDS,
                ignore_result=True,
                retry=False,
            )
        except Exception as error:  # whatever a transport raises
            self.failed += 1
            if not self._is_failing:
                logger.warning(
                    "Nudges cannot be sent to Celery: %r. No message is lost: a resident relay sends them as ever, "
                    'Celery\'s relays find them by their sweep. Where all relays are resident, set OUTBOX["NUDGE"] = False.',
                    error,
                    extra=log_fields(database=nudge.database, broker=nudge.broker),
                )
            self._is_failing = True
            return False
        self.sent += 1
        if self._is_failing:
            logger.info("Nudges are sent again", extra=log_fields(database=nudge.database, broker=nudge.broker))
        self._is_failing = False
        return True


sender = Sender()


def _start_afresh() -> None:
    """Leave the parent's thread and lock behind: they do not work in a forked child."""
    global sender
    sender = Sender()


os.register_at_fork(after_in_child=_start_afresh)
