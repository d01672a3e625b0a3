"""
What a worker holds, and the thread that looks after it while a handler runs.

A handler may take its time: the thread renews the delivery at the broker, keeps the handler's idle transaction alive, hands back
what waits behind it, and breaks it off at its time limit. The inbox has the server end a transaction that is idle for most of
`INVISIBLE`, since its process is frozen then; a process that lives sends a statement now and then.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from outbox import conf, signals
from outbox.brokers.base import Broker, Delivery
from outbox.consuming import tries
from outbox.consuming.register import Consumer
from outbox.database.heartbeats import BEAT_SECONDS
from outbox.errors import BrokerUnavailable, TimeLimitExceeded
from outbox.logs import get_logger, log_fields

logger = get_logger(__name__)

RELEASE_SECONDS = 1.0  # what waits so long behind a handler is handed back
LOOK_SECONDS = 0.25
TOUCH_SECONDS = 5.0  # a handler's idle transaction is touched this often, at least
RENEWALS = 3  # in each INVISIBLE
SLOW = 5  # a handler that runs so many times INVISIBLE is reported


@dataclass(slots=True)
class Held:
    """A delivery that a worker holds, as it is named now: a renewal may change its receipt."""

    delivery: Delivery
    is_lost: bool = False  # its time was over, or somebody else has it


@dataclass(slots=True)
class _Work:
    """A handler at work. Whoever ends or touches it holds the lock: a statement behind its COMMIT would open a transaction."""

    connection: psycopg.Connection[Any]
    consumer: Consumer
    thread: int = field(default_factory=threading.get_ident)
    began_at: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    touched_at: float = field(default_factory=time.monotonic)
    is_over: bool = False
    is_broken_off: bool = False
    is_reported: bool = False

    def keep_alive(self) -> None:
        """Send a statement where the connection does nothing; one that is under way needs none."""
        with self.lock:
            if self.is_over or self.connection.lock.locked():
                return
            if self.connection.info.transaction_status is TransactionStatus.INTRANS:
                with suppress(psycopg.Error):  # what is wrong is the handler's to hear, at its next statement
                    psycopg.Cursor(self.connection).execute("SELECT 1")
        self.touched_at = time.monotonic()

    def break_off(self) -> None:
        """
        Raise `TimeLimitExceeded` in the handler's thread, once, and cancel the statement that it waits for.

        A coroutine has its own way to raise it (`register.py`): its thread waits for a loop.
        """
        with self.lock:
            if not self.is_over and not self.is_broken_off and not self.consumer.is_async:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(TimeLimitExceeded))
            self.is_broken_off = True
            if not self.is_over and self.connection.lock.locked():
                with suppress(psycopg.Error):
                    self.connection.cancel_safe(timeout=LOOK_SECONDS)


def affordable(most: int, invisible: timedelta, seconds_per_message: float) -> int:
    """Return how many messages can be handled before the last of them is handed back: `most` of them, and one at least."""
    seconds = min(invisible.total_seconds() / 2, RELEASE_SECONDS)
    return max(1, min(most, int(seconds / max(seconds_per_message, 1e-6))))


class Keeper:
    """
    Keeps what a worker holds. The worker's thread makes every call; a second thread, which begins at the first handler, looks.

    Args:
        stop: set when the worker is to end.
        worker: its name, as tries have it.
        beat: sends a heartbeat, where nothing else does while a handler runs.
    """

    def __init__(self, stop: threading.Event | None = None, worker: str = "", *, beat: Callable[[], None] | None = None) -> None:
        self.stop = stop or threading.Event()
        self.worker = worker or tries.new_worker_name()
        self._beat = beat
        self._beat_at = 0.0
        self._invisible = conf.settings().consumer.invisible.total_seconds()
        self._broker: Broker | None = None
        self._waiting: deque[list[Held]] = deque()
        self._taken: list[Held] = []
        self._done: list[Held] = []
        self._taken_at = self._renewed_at = 0.0
        self._work: _Work | None = None
        self._lock = threading.Lock()  # around what is held: a delivery is renewed or ended, never both at once
        self._thread: threading.Thread | None = None
        self._wake, self._closed = threading.Event(), threading.Event()
        self._is_asleep = True

    def hold(self, broker: Broker, works: Iterable[Sequence[Delivery]], *, received_at: float) -> None:
        """Hold what was received; each sequence is taken together."""
        with self._lock:
            self._broker = broker
            self._waiting = deque([Held(delivery) for delivery in work] for work in works)
            self._taken, self._done, self._renewed_at = [], [], received_at

    def take(self) -> list[Held]:
        """Take what is to be handled next; an empty list: nothing waits."""
        with self._lock:
            if time.monotonic() - self._renewed_at >= self._invisible:  # it is another's
                self._waiting.clear()
            self._taken = self._waiting.popleft() if self._waiting else []
            self._taken_at = time.monotonic()
            return self._taken

    def end(self, held: Held) -> Delivery:
        """Look after a delivery no more: it ends now. Return it as the broker names it."""
        with self._lock:
            self._taken = [one for one in self._taken if one is not held]
            return held.delivery

    def done(self, held: Held) -> None:
        """Note that a delivery is to be acknowledged."""
        with self._lock:
            self._taken = [one for one in self._taken if one is not held]
            self._done.append(held)

    def end_done(self) -> list[Delivery]:
        """Look no more after what is to be acknowledged: that happens now."""
        with self._lock:
            done, self._done = self._done, []
            return [held.delivery for held in done]

    def end_waiting(self) -> list[Delivery]:
        """Look no more after what waits, and what was taken and not ended: it is handed back now."""
        with self._lock:
            left = [*self._taken, *(held for work in self._waiting for held in work)]
            self._waiting.clear()
            self._taken = []
            return [held.delivery for held in left]

    @contextmanager
    def handler_at_work(self, connection: psycopg.Connection[Any], consumer: Consumer) -> Iterator[None]:
        """Look after a handler that runs in the block, in this thread, over that connection."""
        work = self._work = _Work(connection, consumer)
        self._begin()
        try:
            yield
        finally:
            work.is_over = True  # at once: a time limit may strike in the next line
            with work.lock:
                pass
            if self._work is work:
                self._work = None

    def close(self) -> None:
        """End the thread, soon."""
        self._closed.set()
        self._wake.set()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"outbox keeper of {self.worker}", daemon=True)
            self._thread.start()
        if self._is_asleep:
            self._wake.set()

    def _run(self) -> None:
        pause = min(LOOK_SECONDS, self._invisible / 10)
        while not self._closed.is_set():
            self._is_asleep = True  # before the look: whoever begins after it wakes this thread
            if self._work is None:
                self._wake.wait()
            self._is_asleep = False
            self._wake.clear()
            self._closed.wait(pause)
            if (work := self._work) is not None:
                self._look(work)

    def _look(self, work: _Work) -> None:
        now = time.monotonic()
        runs_for = now - work.began_at
        limit = work.consumer.time_limit
        try:
            if limit is not None and runs_for >= limit.total_seconds():
                work.break_off()
            elif now - work.touched_at >= min(self._invisible / 4, TOUCH_SECONDS):
                work.keep_alive()
            if runs_for >= SLOW * self._invisible and not work.is_reported:
                work.is_reported = True
                self._report(work)
            with self._lock:
                self._release(now)
                self._renew(now, is_given_up=work.is_broken_off)
            if self._beat is not None and now - max(self._beat_at, work.began_at) >= BEAT_SECONDS:
                self._beat_at = now  # first: a database that is away is asked no more often
                self._beat()
        except (BrokerUnavailable, psycopg.OperationalError) as error:
            logger.warning("What %s holds could not be renewed: %s", self.worker, str(error).strip())
        except Exception:
            logger.exception("What %s holds could not be renewed.", self.worker)

    def _release(self, now: float) -> None:
        if self._waiting and self._broker and now - self._taken_at >= min(RELEASE_SECONDS, self._invisible / 4):
            waiting = [held.delivery for work in self._waiting for held in work]
            self._waiting.clear()
            self._broker.release(waiting)

    def _renew(self, now: float, *, is_given_up: bool) -> None:
        waiting = [one for work in self._waiting for one in work]
        held = [one for one in (*self._done, *waiting, *(() if is_given_up else self._taken)) if not one.is_lost]
        if not held or self._broker is None or now - self._renewed_at < self._invisible / RENEWALS:
            return
        invisible_for = conf.settings().consumer.invisible
        renewed = self._broker.renew([one.delivery for one in held], invisible_for)
        self._renewed_at = now
        for one, delivery in zip(held, renewed, strict=True):
            one.is_lost = delivery is None
            one.delivery = delivery or one.delivery
        self._waiting = deque(left for work in self._waiting if (left := [one for one in work if not one.is_lost]))

    def _report(self, work: _Work) -> None:
        name, group = work.consumer.name, work.consumer.group
        text = (
            f"{name} of group {group!r} has been handling a message for more than {SLOW} x OUTBOX['CONSUMER']['INVISIBLE']. "
            "Give it a time_limit, or look what it waits for."
        )
        logger.error(text, extra=log_fields(group=group, topic=work.consumer.topic))
        signals.alarm.send_robust(sender=Consumer, reason=text, details={"group": group, "handler": name})
