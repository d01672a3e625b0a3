"""
The deliveries that a worker holds, and the thread that looks after them while a handler runs.

A handler may be slow: the thread renews its delivery at the broker, keeps its idle transaction alive, defers the deliveries that
wait behind it, and interrupts it at its time limit. If that does not help, the thread ends the process, unless the process runs
other work, too. The inbox sets a timeout of most of `INVISIBLE` for idle transactions, so that the server ends that of a frozen
process; the thread of a live process sends a statement from time to time.
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
from outbox.logs import get_logger, log_fields
from outbox.shutdown import give_up_handler

logger = get_logger(__name__)

SLOW_SECONDS = 1.0  # a handler that runs for longer keeps no other deliveries waiting
LOOK_SECONDS = 0.25
TOUCH_SECONDS = 5.0  # maximum time between two statements in a handler's idle transaction
RENEWALS = 3  # in each INVISIBLE
INTERRUPT_SECONDS = 1.0  # between two interruptions of a handler beyond its time limit
GIVE_UP_SECONDS = 10.0  # beyond its time limit; more than a coroutine has to end (`register.CANCEL_SECONDS`)
REPORTED_AFTER = 5  # a handler that runs for this many times INVISIBLE is reported

_serial = itertools.count(1)


class Held(msgspec.Struct):
    """A delivery that a worker holds, with its current receipt, which a renewal may change."""

    delivery: Delivery
    is_lost: bool = False  # it has expired, or another worker has it


class LeaseThread:
    """
    Holds the deliveries of a worker, and has the thread that renews them. The worker's own thread makes every call; the lease
    thread starts with the first handler.

    Args:
        stop: set when the worker should end.
        worker: its name, for logs.
        beat: sends a heartbeat while a handler runs, where nothing else in the process does.
        unload: defers deliveries that wait behind a slow handler, and acknowledges them and those that are done.
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
        self._work: _Work | None = None
        self._lock = threading.Lock()  # so that a delivery is not renewed and settled at the same time
        self._thread: threading.Thread | None = None
        self._wake, self._closed = threading.Event(), threading.Event()
        self._is_asleep = True

    def hold(self, broker: Receives, works: Iterable[Sequence[Delivery]], *, received_at: float) -> None:
        """Hold received deliveries; each sequence is handled together."""
        with self._lock:
            self._broker = broker
            self._waiting = deque([Held(delivery) for delivery in work] for work in works)
            self._taken, self._done, self._renewed_at = [], [], received_at

    def take(self) -> list[Held]:
        """Return the deliveries to handle next; an empty list where none wait."""
        with self._lock:
            if time.monotonic() - self._renewed_at >= self._invisible:  # others may have them
                self._waiting.clear()
            self._taken = self._waiting.popleft() if self._waiting else []
            return self._taken

    def done(self, held: Held) -> None:
        """Mark a delivery as one to be acknowledged."""
        with self._lock:
            self._taken = [other for other in self._taken if other is not held]
            self._done.append(held)

    def end_done(self) -> list[Delivery]:
        """Stop looking after deliveries that are done, and return them to be acknowledged."""
        with self._lock:
            done, self._done = self._done, []
            return [held.delivery for held in done]

    def end_waiting(self) -> list[Delivery]:
        """Stop looking after deliveries that are not done, and return them."""
        with self._lock:
            left = [*self._taken, *(held for work in self._waiting for held in work)]
            self._waiting.clear()
            self._taken = []
            return [held.delivery for held in left]

    @contextmanager
    def handler_at_work(self, connection: psycopg.Connection[Any], consumer: Consumer, delivery: Delivery) -> Iterator[None]:
        """Look after the handler that runs in the block with a message, in this thread and over this connection."""
        work = self._work = _Work(connection, consumer, delivery)
        self._begin()
        try:
            yield
        finally:
            work.is_over = True  # first, since a time limit may interrupt the next line
            with work.lock:
                pass
            if self._work is work:
                self._work = None

    def running(self) -> Handling | None:
        """Return the handler that runs now, from any thread; None if none does."""
        work = self._work
        if work is None:
            return None
        limit = work.consumer.time_limit
        return Handling(
            topic=work.delivery.topic,
            message_id=work.delivery.message_id,
            handler=work.consumer.name,
            seconds=time.monotonic() - work.began_at,
            limit_seconds=limit.total_seconds() if limit is not None else None,
        )

    def close(self) -> None:
        """Ask the thread to end."""
        self._closed.set()
        self._wake.set()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"outbox lease thread of {self.worker}", daemon=True)
            self._thread.start()
        if self._is_asleep:
            self._wake.set()

    def _run(self) -> None:
        pause = min(LOOK_SECONDS, self._invisible / 10)
        while not self._closed.is_set():
            self._is_asleep = True  # before the check: a handler that begins after it wakes this thread
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
                if runs_for >= limit.total_seconds() + GIVE_UP_SECONDS and work.give_up():
                    self._report_given_up(work, limit)
            elif now - work.touched_at >= min(self._invisible / 4, TOUCH_SECONDS):
                work.keep_alive()
            if runs_for >= REPORTED_AFTER * self._invisible and not work.is_reported:
                work.is_reported = True
                self._report_slow(work)
            with self._lock:
                self._unload_waiting(work, runs_for)
                self._renew(now, is_given_up=work.is_broken_off)
            if self._beat is not None and now - max(self._beat_at, work.began_at) >= BEAT_SECONDS:
                self._beat_at = now  # first, so that a database that is away is not asked more often
                self._beat()
        except (BrokerUnavailable, psycopg.OperationalError) as error:
            logger.warning("The deliveries of worker %s could not be renewed: %s", self.worker, str(error).strip())
        except Exception:
            logger.exception("The deliveries of worker %s could not be renewed.", self.worker)

    def _unload_waiting(self, work: _Work, runs_for: float) -> None:
        """
        Defer the messages that wait behind a slow handler.

        Messages of the key that it handles stay: they would get before it if it fails.
        """
        if self._unload is None or runs_for < min(SLOW_SECONDS, self._invisible / 4) or not (self._waiting or self._done):
            return
        key = order_key_of(work.delivery)
        behind: deque[list[Held]] = deque()
        others: list[Delivery] = []
        for held in itertools.chain.from_iterable(self._waiting):
            if key is not None and order_key_of(held.delivery) == key:
                behind.append([held])
            else:
                others.append(held.delivery)
        if others or self._done:
            self._unload(others, [held.delivery for held in self._done])
        self._waiting = behind
        self._done = []

    def _renew(self, now: float, *, is_given_up: bool) -> None:
        waiting = [held for work in self._waiting for held in work]
        held = [delivery for delivery in (*self._done, *waiting, *(() if is_given_up else self._taken)) if not delivery.is_lost]
        if not held or self._broker is None or now - self._renewed_at < self._invisible / RENEWALS:
            return
        invisible_for = conf.settings().consumer.invisible
        renewed = self._broker.renew([entry.delivery for entry in held], invisible_for)
        self._renewed_at = now
        for entry, delivery in zip(held, renewed, strict=True):
            entry.is_lost = delivery is None
            entry.delivery = delivery or entry.delivery
        self._waiting = deque(left for work in self._waiting if (left := [entry for entry in work if not entry.is_lost]))

    def _report_given_up(self, work: _Work, limit: timedelta) -> None:
        effect = (
            "This process ends, so that its supervisor starts it anew"
            if work.ends_process
            else "This process does not end, because it runs other work, too: restart it, since the handler keeps one of its "
            "threads. Of Celery's pools, only prefork can end a process"
        )
        self._alert(
            work,
            f"{work.consumer.name} of group {work.consumer.group!r} still runs {GIVE_UP_SECONDS:.0f} s after its time_limit of "
            f"{limit.total_seconds():g} s: it caught TimeLimitExceeded, or is in a call that Python cannot interrupt. "
            f"{effect}. The transaction is rolled back, and the message is delivered again. Do not catch BaseException in the "
            "handler, and set a time-out for each of its calls.",
        )

    def _report_slow(self, work: _Work) -> None:
        self._alert(
            work,
            f"{work.consumer.name} of group {work.consumer.group!r} has been handling a message for more than "
            f"{REPORTED_AFTER} x OUTBOX['CONSUMER']['INVISIBLE']. Find out what it waits for, or set a time_limit.",
        )

    def _alert(self, work: _Work, text: str) -> None:
        name, group = work.consumer.name, work.consumer.group
        logger.error(text, extra=log_fields(group=group, topic=work.consumer.topic))
        signals.alert.send_robust(sender=Consumer, reason=text, details={"group": group, "handler": name})


class _Work(msgspec.Struct):
    """
    A running handler.

    The lock is held to end it and to use its connection: a statement after its COMMIT would open a transaction.
    """

    connection: psycopg.Connection[Any]
    consumer: Consumer
    delivery: Delivery
    thread: int = msgspec.field(default_factory=threading.get_ident)
    began_at: float = msgspec.field(default_factory=time.monotonic)
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    touched_at: float = msgspec.field(default_factory=time.monotonic)
    is_over: bool = False
    is_broken_off: bool = False
    interrupted_at: float = float("-inf")
    is_given_up: bool = False
    ends_process: bool = False
    is_reported: bool = False

    def keep_alive(self) -> None:
        """Send a statement if the connection is idle."""
        with self.lock:
            if self.is_over or self.connection.lock.locked():
                return
            if self.connection.info.transaction_status is TransactionStatus.INTRANS:
                with suppress(psycopg.Error):  # the handler sees the error at its next statement
                    psycopg.Cursor(self.connection).execute("SELECT 1")
        self.touched_at = time.monotonic()

    def break_off(self) -> None:
        """
        Raise `TimeLimitExceeded` in the handler's thread, and cancel the statement that it waits for.

        A handler may catch the exception, so it is raised again each second. Coroutines raise it themselves (`register.py`),
        since their thread waits for an event loop.
        """
        now = time.monotonic()
        with self.lock:
            self.is_broken_off = True
            if self.is_over:
                return
            if not self.consumer.is_async and now - self.interrupted_at >= INTERRUPT_SECONDS:
                self.interrupted_at = now
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread), ctypes.py_object(TimeLimitExceeded))
            if self.connection.lock.locked():
                with suppress(psycopg.Error):
                    self.connection.cancel_safe(timeout=LOOK_SECONDS)

    def give_up(self) -> bool:
        """End the process, if it may exit, without waiting for the handler; return whether this is the first call."""
        with self.lock:
            if self.is_over or self.is_given_up:
                return False
            self.is_given_up = True
            self.ends_process = give_up_handler(self.thread)
            return True


def affordable(most: int, invisible: timedelta, seconds_per_message: float) -> int:
    """Return how many messages can be handled before waiting ones are deferred: at least one, and not more than `most`."""
    seconds = min(invisible.total_seconds() / 2, SLOW_SECONDS)
    return max(1, min(most, int(seconds / max(seconds_per_message, 1e-6))))


def new_worker_name() -> str:
    """Return a unique name for a worker: process and a number."""
    return f"{heartbeats.instance()}:{next(_serial)}"
