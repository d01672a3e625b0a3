"""
The lease thread of a worker: it renews the worker's deliveries while a handler runs.

While a handler is slow, the thread renews the worker's deliveries at the broker, keeps the handler's idle transaction alive,
defers the messages that wait behind the handler, and interrupts the handler at its time limit. If the handler still does not end,
the thread ends the process, unless the process also runs other work. The inbox sets a timeout for idle transactions that is
shorter than `INVISIBLE`, so that the server ends the transaction of a frozen process before the message is redelivered. In a live
process the thread keeps that timeout from expiring: it sends a statement at least every quarter of
`INVISIBLE`.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
from psycopg.pq import TransactionStatus

from outbox import conf, signals
from outbox.brokers.base import Delivery
from outbox.brokers.capabilities import Receives
from outbox.consuming.delivery_info import order_key_of
from outbox.consuming.register import Consumer
from outbox.database import heartbeats
from outbox.database.heartbeats import BEAT_SECONDS, Handling
from outbox.errors import BrokerUnavailable, TimeLimitExceeded
from outbox.logs import get_logger, log_fields, storable
from outbox.shutdown import give_up_handler

logger = get_logger(__name__)

SLOW_SECONDS = 1.0  # when a handler has run for this time, the deliveries that wait behind it are deferred
CHECK_SECONDS = 0.25  # interval of the checks of a running handler
TOUCH_SECONDS = 5.0  # maximum interval of the statements that keep an idle transaction alive
RENEWALS = 3  # a delivery is renewed after each INVISIBLE / RENEWALS
INTERRUPT_SECONDS = 1.0  # interval of the interruptions of a handler after its time limit
GIVE_UP_SECONDS = 10.0  # this time after its limit a handler is given up; longer than `register.CANCEL_SECONDS` for coroutines
REPORTED_AFTER = 5  # a handler that has run for this multiple of INVISIBLE is reported in an alert

_worker_numbers = itertools.count(1)


class Held(msgspec.Struct):
    """A delivery that a worker holds. A renewal replaces `delivery`, since it may change the receipt."""

    delivery: Delivery
    is_lost: bool = False  # whether a renewal has failed: the delivery has expired, or another worker has the message


class LeaseThread:
    """
    Holds the deliveries of a worker, and renews them in another thread, which starts with the first handler.

    A delivery is first *waiting*, then *taken* by the worker, then *done*: its outcome is stored, and it can be acknowledged.
    Only the worker's thread calls the public methods, except `running`.

    Args:
        stop: set when the worker should end.
        worker: the worker's name, for logs.
        beat: sends a heartbeat while a handler runs; None if another thread of the process sends them.
        unload: while a slow handler runs, called in the lease thread with the waiting deliveries and the done ones; defers the
            former, and acknowledges both. None if deliveries have to wait for a slow handler.
    """

    def __init__(
        self,
        stop: threading.Event | None = None,
        worker: str = "",
        *,
        beat: Callable[[], None] | None = None,
        unload: Callable[[Sequence[Delivery], Sequence[Delivery]], None] | None = None,
    ) -> None:
        self.stop = stop or threading.Event()
        self.worker = worker or new_worker_name()
        self._beat = beat
        self._unload = unload
        self._beat_at = 0.0
        self._invisible = conf.settings().consumer.invisible.total_seconds()
        self._broker: Receives | None = None
        self._waiting: deque[list[Held]] = deque()
        self._taken: list[Held] = []
        self._done: list[Held] = []
        self._renewed_at = 0.0
        self._work: _RunningHandler | None = None
        self._lock = threading.Lock()  # guards the lists of deliveries, so that none is renewed and acknowledged at the same time
        self._thread: threading.Thread | None = None
        self._wake, self._closed = threading.Event(), threading.Event()
        self._is_asleep = True

    def hold(self, broker: Receives, works: Iterable[Sequence[Delivery]], *, received_at: float) -> None:
        """Hold received deliveries; `works` are lists, each of deliveries that are handled together."""
        with self._lock:
            self._broker = broker
            self._waiting = deque([Held(delivery) for delivery in work] for work in works)
            self._taken, self._done, self._renewed_at = [], [], received_at

    def take(self) -> list[Held]:
        """Take the deliveries to handle next, and return them; an empty list if no deliveries are waiting."""
        with self._lock:
            if time.monotonic() - self._renewed_at >= self._invisible:  # the deliveries have expired, and others may have them
                self._waiting.clear()
            self._taken = self._waiting.popleft() if self._waiting else []
            return self._taken

    def done(self, held: Held) -> None:
        """Mark a taken delivery as done, so that it can be acknowledged."""
        with self._lock:
            self._taken = [other for other in self._taken if other is not held]
            self._done.append(held)

    def end_done(self) -> list[Delivery]:
        """Stop holding the deliveries that are done, and return them, so that the caller can acknowledge them."""
        with self._lock:
            done, self._done = self._done, []
            return [held.delivery for held in done]

    def end_waiting(self) -> list[Delivery]:
        """Stop holding the taken and waiting deliveries, and return them, so that the caller can defer or release them."""
        with self._lock:
            remaining = [*self._taken, *(held for work in self._waiting for held in work)]
            self._waiting.clear()
            self._taken = []
            return [held.delivery for held in remaining]

    @contextmanager
    def handler_at_work(self, connection: psycopg.Connection[Any], consumer: Consumer, delivery: Delivery) -> Iterator[None]:
        """Watch the handler that runs in the block, in this thread, with this delivery and in the connection's transaction."""
        work = self._work = _RunningHandler(connection, consumer, delivery)
        self._wake_thread()
        try:
            yield
        finally:
            work.is_over = True  # first, since TimeLimitExceeded may be raised until then; the lock waits for the lease thread
            with work.lock:
                pass
            if self._work is work:
                self._work = None

    def running(self) -> Handling | None:
        """Return a description of the running handler, None if none runs; may be called from any thread."""
        work = self._work
        if work is None:
            return None
        limit = work.consumer.time_limit
        return Handling(
            topic=work.delivery.topic,
            message_id=storable(work.delivery.message_id),  # as in outbox_deferred
            handler=work.consumer.name,
            seconds=time.monotonic() - work.began_at,
            limit_seconds=limit.total_seconds() if limit is not None else None,
        )

    def close(self) -> None:
        """Ask the lease thread to end; do not wait for it."""
        self._closed.set()
        self._wake.set()

    def _wake_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"outbox lease thread of {self.worker}", daemon=True)
            self._thread.start()
        if self._is_asleep:
            self._wake.set()

    def _run(self) -> None:
        pause = min(CHECK_SECONDS, self._invisible / 10)
        while not self._closed.is_set():
            self._is_asleep = True  # before `_work` is checked, so that a handler that begins just after that wakes this thread
            if self._work is None:
                self._wake.wait()
            self._is_asleep = False
            self._wake.clear()
            self._closed.wait(pause)
            if (work := self._work) is not None:
                self._check(work)

    def _check(self, work: _RunningHandler) -> None:
        now = time.monotonic()
        runs_for = now - work.began_at
        limit = work.consumer.time_limit
        try:
            if limit is not None and runs_for >= limit.total_seconds():
                work.interrupt()
                if runs_for >= limit.total_seconds() + GIVE_UP_SECONDS and work.give_up():
                    self._report_given_up(work, limit)
            elif now - work.touched_at >= min(self._invisible / 4, TOUCH_SECONDS):
                work.keep_alive()
            if runs_for >= REPORTED_AFTER * self._invisible and not work.is_reported:
                work.is_reported = True
                self._report_slow(work)
            with self._lock:
                self._unload_waiting(work, runs_for)
                self._renew(now, is_interrupted=work.is_interrupted)
            if self._beat is not None and now - max(self._beat_at, work.began_at) >= BEAT_SECONDS:
                self._beat_at = now  # before the try, so that a failed one (database unavailable) is not repeated sooner
                self._beat()
        except (BrokerUnavailable, psycopg.OperationalError) as error:
            logger.warning("The lease thread of worker %s failed, and tries again: %s", self.worker, str(error).strip())
        except Exception:
            logger.exception("The lease thread of worker %s failed, and tries again.", self.worker)

    def _unload_waiting(self, work: _RunningHandler, runs_for: float) -> None:
        """
        Defer the messages that wait behind a slow handler, and acknowledge those that are done.

        Messages of the handler's order key stay. If they were deferred, and the handler then failed, they would be stored before
        the failed message, and so be handled before it.
        """
        if self._unload is None or runs_for < min(SLOW_SECONDS, self._invisible / 4) or not (self._waiting or self._done):
            return
        key = order_key_of(work.delivery)
        same_key: deque[list[Held]] = deque()
        others: list[Delivery] = []
        for held in itertools.chain.from_iterable(self._waiting):
            if key is not None and order_key_of(held.delivery) == key:
                same_key.append([held])
            else:
                others.append(held.delivery)
        if others or self._done:
            self._unload(others, [held.delivery for held in self._done])
        self._waiting = same_key
        self._done = []

    def _renew(self, now: float, *, is_interrupted: bool) -> None:
        """Renew the deliveries when it is time; the taken ones only if their handler was not interrupted at its time limit."""
        waiting = [entry for work in self._waiting for entry in work]
        held = [entry for entry in (*self._done, *waiting, *(() if is_interrupted else self._taken)) if not entry.is_lost]
        if not held or self._broker is None or now - self._renewed_at < self._invisible / RENEWALS:
            return
        invisible_for = conf.settings().consumer.invisible
        renewed = self._broker.renew([entry.delivery for entry in held], invisible_for)
        self._renewed_at = now
        for entry, delivery in zip(held, renewed, strict=True):
            entry.is_lost = delivery is None
            entry.delivery = delivery or entry.delivery
        self._waiting = deque(kept for work in self._waiting if (kept := [entry for entry in work if not entry.is_lost]))

    def _report_given_up(self, work: _RunningHandler, limit: timedelta) -> None:
        effect = (
            "This process ends, so that its supervisor starts it again"
            if work.ends_process
            else "This process does not end, because it runs other work, too. Restart it, since the handler occupies one of its "
            "threads. Of Celery's pools, only prefork can end a process"
        )
        self._alert(
            work,
            f"{work.consumer.name} of group {work.consumer.group!r} still runs {GIVE_UP_SECONDS:.0f} s after its time_limit of "
            f"{limit.total_seconds():g} s: it caught TimeLimitExceeded, or is in a call that Python cannot interrupt. "
            f"{effect}. The transaction is rolled back, and the message is delivered again. Do not catch BaseException in the "
            "handler, and set a timeout for each of its calls.",
        )

    def _report_slow(self, work: _RunningHandler) -> None:
        self._alert(
            work,
            f"{work.consumer.name} of group {work.consumer.group!r} has been handling a message for more than "
            f"{REPORTED_AFTER} x OUTBOX['CONSUMER']['INVISIBLE']. Find out what it waits for, or set a time_limit.",
        )

    def _alert(self, work: _RunningHandler, text: str) -> None:
        name, group = work.consumer.name, work.consumer.group
        logger.error(text, extra=log_fields(group=group, topic=work.consumer.topic))
        signals.alert.send_robust(sender=Consumer, reason=text, details={"group": group, "handler": name})


class _RunningHandler(msgspec.Struct):
    """
    A running handler.

    The lease thread holds `lock` while it interrupts the handler or uses the handler's connection. When the handler ends, its
    thread sets `is_over`, and then waits for the lock. So the lease thread sends no statement after the COMMIT of the handler's
    transaction, which would begin another transaction.
    """

    connection: psycopg.Connection[Any]
    consumer: Consumer
    delivery: Delivery
    thread: int = msgspec.field(default_factory=threading.get_ident)
    began_at: float = msgspec.field(default_factory=time.monotonic)
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    touched_at: float = msgspec.field(default_factory=time.monotonic)
    is_over: bool = False
    is_interrupted: bool = False
    interrupted_at: float = float("-inf")
    is_given_up: bool = False
    ends_process: bool = False
    is_reported: bool = False

    def keep_alive(self) -> None:
        """Send a statement in the handler's transaction, unless the handler itself is executing one."""
        with self.lock:
            if self.is_over or self.connection.lock.locked():
                return
            if self.connection.info.transaction_status is TransactionStatus.INTRANS:
                with suppress(psycopg.Error):  # the handler sees the error at its next statement
                    psycopg.Cursor(self.connection).execute("SELECT 1")
        self.touched_at = time.monotonic()

    def interrupt(self) -> None:
        """
        Raise `TimeLimitExceeded` in the handler's thread, and cancel the statement that the handler waits for.

        The handler may catch the exception, so it is raised again each second. A coroutine raises it itself
        (`register.run_to_end`), since its thread waits for an event loop.
        """
        now = time.monotonic()
        with self.lock:
            self.is_interrupted = True
            if self.is_over:
                return
            if not self.consumer.is_async and now - self.interrupted_at >= INTERRUPT_SECONDS:
                self.interrupted_at = now
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(TimeLimitExceeded))
            if self.connection.lock.locked():
                with suppress(psycopg.Error):
                    self.connection.cancel_safe(timeout=CHECK_SECONDS)

    def give_up(self) -> bool:
        """Abandon the handler, and end the process if it may exit. Return False if it is over or was abandoned before."""
        with self.lock:
            if self.is_over or self.is_given_up:
                return False
            self.is_given_up = True
            self.ends_process = give_up_handler(self.thread)
            return True


def affordable(maximum: int, invisible: timedelta, seconds_per_message: float) -> int:
    """Return how many messages a worker can handle before it would defer waiting ones as slow: at least 1, at most `maximum`."""
    seconds = min(invisible.total_seconds() / 2, SLOW_SECONDS)
    return max(1, min(maximum, int(seconds / max(seconds_per_message, 1e-6))))


def new_worker_name() -> str:
    """Return a new name for a worker, made of the name of this process and a number."""
    return f"{heartbeats.instance()}:{next(_worker_numbers)}"
