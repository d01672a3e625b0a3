"""
The deliveries that a worker holds, and the thread that looks after them while a handler runs.

A handler may be slow: the thread renews its delivery at the broker, keeps its idle transaction alive, hands back the
deliveries that wait behind it, and interrupts it at its time limit. If that does not help, the thread ends the process, unless
the process runs other work, too. The inbox sets a timeout of most of `INVISIBLE` for idle transactions, so that the server ends
that of a frozen process; the thread of a live process sends a statement from time to time.

`read_holdings` returns what all workers of this process hold and handle, and which topics they cannot receive from, for its
heartbeats.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import psycopg
from psycopg.pq import TransactionStatus

from outbox import conf, signals
from outbox.brokers.base import Broker, Delivery
from outbox.consuming.register import Consumer
from outbox.database import heartbeats
from outbox.database.heartbeats import BEAT_SECONDS, Handling
from outbox.errors import BrokerUnavailable, TimeLimitExceeded
from outbox.logs import get_logger, log_fields
from outbox.shutdown import give_up_handler

logger = get_logger(__name__)

RELEASE_SECONDS = 1.0  # deliveries that wait so long behind a handler are handed back
LOOK_SECONDS = 0.25
TOUCH_SECONDS = 5.0  # maximum time between two statements in a handler's idle transaction
RENEWALS = 3  # in each INVISIBLE
INTERRUPT_SECONDS = 1.0  # between two interruptions of a handler beyond its time limit
GIVE_UP_SECONDS = 10.0  # beyond its time limit; more than a coroutine has to end (`register.CANCEL_SECONDS`)
SLOW = 5  # a handler that runs for this many times INVISIBLE is reported

_serial = itertools.count(1)


@dataclass(slots=True)
class Held:
    """A delivery that a worker holds, with its current receipt, which a renewal may change."""

    delivery: Delivery
    is_lost: bool = False  # it has expired, or another worker has it


class LeaseThread:
    """
    Holds the deliveries of a worker, and has the thread that renews them. The worker's own thread makes every call; the lease
    thread starts with the first handler.

    Args:
        stop: set when the worker should end.
        worker: its name in the table of failure counts.
        beat: sends a heartbeat while a handler runs, where nothing else in the process does.
    """

    def __init__(self, stop: threading.Event | None = None, worker: str = "", *, beat: Callable[[], None] | None = None) -> None:
        self.stop = stop or threading.Event()
        self.worker = worker or new_worker_name()
        self._beat = beat
        self._beat_at = 0.0
        self._invisible = conf.settings().consumer.invisible.total_seconds()
        self._broker: Broker | None = None
        self._waiting: deque[list[Held]] = deque()
        self._taken: list[Held] = []
        self._done: list[Held] = []
        self._taken_at = self._renewed_at = 0.0
        self._work: _Work | None = None
        self._lock = threading.Lock()  # so that a delivery is not renewed and settled at the same time
        self._thread: threading.Thread | None = None
        self._wake, self._closed = threading.Event(), threading.Event()
        self._is_asleep = True

    def hold(self, broker: Broker, works: Iterable[Sequence[Delivery]], *, received_at: float) -> None:
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
            self._taken_at = time.monotonic()
            return self._taken

    def end(self, held: Held) -> Delivery:
        """Stop looking after a delivery that is about to be settled. Return it with its current receipt."""
        with self._lock:
            self._taken = [one for one in self._taken if one is not held]
            return held.delivery

    def done(self, held: Held) -> None:
        """Mark a delivery as handled, to be acknowledged."""
        with self._lock:
            self._taken = [one for one in self._taken if one is not held]
            self._done.append(held)

    def end_done(self) -> list[Delivery]:
        """Stop looking after handled deliveries, and return them to be acknowledged."""
        with self._lock:
            done, self._done = self._done, []
            return [held.delivery for held in done]

    def end_waiting(self) -> list[Delivery]:
        """Stop looking after deliveries that are not settled, and return them to be handed back."""
        with self._lock:
            left = [*self._taken, *(held for work in self._waiting for held in work)]
            self._waiting.clear()
            self._taken = []
            return [held.delivery for held in left]

    @contextmanager
    def handler_at_work(self, connection: psycopg.Connection[Any], consumer: Consumer) -> Iterator[None]:
        """Look after the handler that runs in the block, in this thread and over this connection."""
        work = self._work = _Work(connection, consumer)
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
        work, taken = self._work, self._taken
        if work is None or not taken:
            return None
        limit = work.consumer.time_limit
        return Handling(
            topic=taken[0].delivery.topic,
            message_id=taken[0].delivery.message_id,
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
            if runs_for >= SLOW * self._invisible and not work.is_reported:
                work.is_reported = True
                self._report_slow(work)
            with self._lock:
                self._release(now)
                self._renew(now, is_given_up=work.is_broken_off)
            if self._beat is not None and now - max(self._beat_at, work.began_at) >= BEAT_SECONDS:
                self._beat_at = now  # first, so that a database that is away is not asked more often
                self._beat()
        except (BrokerUnavailable, psycopg.OperationalError) as error:
            logger.warning("The deliveries of worker %s could not be renewed: %s", self.worker, str(error).strip())
        except Exception:
            logger.exception("The deliveries of worker %s could not be renewed.", self.worker)

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
            f"{SLOW} x OUTBOX['CONSUMER']['INVISIBLE']. Find out what it waits for, or set a time_limit.",
        )

    def _alert(self, work: _Work, text: str) -> None:
        name, group = work.consumer.name, work.consumer.group
        logger.error(text, extra=log_fields(group=group, topic=work.consumer.topic))
        signals.alert.send_robust(sender=Consumer, reason=text, details={"group": group, "handler": name})


@dataclass(slots=True)
class _Work:
    """
    A running handler.

    The lock is held to end it and to use its connection: a statement after its COMMIT would open a transaction.
    """

    connection: psycopg.Connection[Any]
    consumer: Consumer
    thread: int = field(default_factory=threading.get_ident)
    began_at: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    touched_at: float = field(default_factory=time.monotonic)
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
    """Return how many messages can be handled before waiting ones are handed back: at least one, and not more than `most`."""
    seconds = min(invisible.total_seconds() / 2, RELEASE_SECONDS)
    return max(1, min(most, int(seconds / max(seconds_per_message, 1e-6))))


def new_worker_name() -> str:
    """Return a unique name for a worker: process and a number."""
    return f"{heartbeats.instance()}:{next(_serial)}"


@dataclass(slots=True)
class Holdings:
    """
    The state of workers.

    Args:
        held: topic -> messages that the broker's backlog lacks.
        refusals: topic -> why it cannot be received from as configured.
        handling: the handler that has been running for the longest time; None if none runs.
    """

    held: Counter[str] = field(default_factory=Counter)
    refusals: dict[str, str] = field(default_factory=dict)
    handling: Handling | None = None


_workers_lock = threading.Lock()
_clients: dict[tuple[str, str], WeakValueDictionary[str, Broker]] = {}  # broker and group -> by worker
_lease_threads: dict[tuple[str, str], WeakValueDictionary[str, LeaseThread]] = {}


def note_worker(alias: str, group: str, worker: str, broker: Broker, lease_thread: LeaseThread) -> None:
    """Remember what a worker receives and handles with."""
    with _workers_lock:
        _clients.setdefault((alias, group), WeakValueDictionary())[worker] = broker
        _lease_threads.setdefault((alias, group), WeakValueDictionary())[worker] = lease_thread


def forget_worker(alias: str, group: str, worker: str) -> None:
    """Forget a worker whose broker client is closed."""
    with _workers_lock:
        for known in (_clients, _lease_threads):
            known.get((alias, group), WeakValueDictionary()).pop(worker, None)


def read_holdings(alias: str, group: str) -> Holdings:
    """Return the sum of all workers of a group at a broker."""
    with _workers_lock:
        clients = list(_clients.get((alias, group), {}).values())
        lease_threads = list(_lease_threads.get((alias, group), {}).values())
    total = Holdings()
    for broker in clients:
        total.held.update(broker.held(group))
        total.refusals.update(broker.refusals())
    running = [one for one in (lease_thread.running() for lease_thread in lease_threads) if one is not None]
    total.handling = max(running, key=lambda one: one.seconds, default=None)
    return total
