"""
Graceful shutdown of a process within 5 seconds of the request, whatever its threads wait for.

A process that is asked to end finishes the calls in progress and releases the rest of its work. If a server is frozen, a call
to it may never return; then the process ends without waiting for it. Nothing is lost, just as when the process is killed: other
processes take over its batches, lanes and deliveries when its connection breaks or the lease is over.

A consumer's handler is not interrupted: the 5 seconds begin when the handler returns, or when the end is requested a second
time. If a handler still runs long after its time limit, its process ends, if it may exit; handlers in other threads then have a
minute to return.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from outbox.logs import get_logger

logger = get_logger(__name__)

LIMIT_SECONDS = 4.0  # the time for calls in progress, from the request or from the end of the last handler
OTHERS_SECONDS = 60.0  # the time for other handlers, after one handler was given up
EXIT_SECONDS = 0.5  # additional time for the interpreter, which waits for threads of libraries
POLL_SECONDS = 0.1
LOG_SECONDS = 0.3  # the time for writing the log, which may block, too

UNFINISHED = 3
"""Exit code of a process that ended on request, without waiting for a call that did not return."""

GIVEN_UP = 1
"""Exit code of a process that ended because a handler was still running long after its time limit."""

_in_handlers: set[int] = set()  # threads that run a user's handler
_given_up: set[int] = set()  # threads whose handler was given up, and has not returned yet
_exiting: set[ShutdownWatch] = set()  # started watches that may exit this process


def is_shutdown(error: BaseException, *, is_requested: bool) -> bool:
    """
    Return whether an exception shuts the process down, instead of being an error of the code that raised it.

    Args:
        is_requested: whether the end was requested. Without a request, `sys.exit()` is an error of its caller.
    """
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    return isinstance(error, SystemExit) and (is_requested or _is_raised_by_signal(error))


def _is_raised_by_signal(error: BaseException) -> bool:
    """Return whether a signal handler, a function (signum, frame), raised an error, as in a child of Celery's prefork pool."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in frames:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        values = [frame.f_locals.get(name) for name in names[-2:]]
        if len(values) == 2 and isinstance(values[0], int) and isinstance(values[1], FrameType):
            return True
    return False


@contextmanager
def handler_runs() -> Iterator[None]:
    """Mark that the calling thread runs a user's handler in the block, which a shutdown does not interrupt."""
    thread = threading.get_ident()
    _in_handlers.add(thread)
    try:
        yield
    finally:
        _in_handlers.discard(thread)
        _given_up.discard(thread)


def give_up_handler(thread: int) -> bool:
    """Request the end of this process without waiting for the handler in a thread; return whether the process ends."""
    _given_up.add(thread)
    _in_handlers.discard(thread)
    return bool(_exiting)


class ShutdownWatch(threading.Thread):
    """
    Watches, from `start` to `close`, for a request to end a process or a task in it.

    Args:
        requests: returns how often the end was requested; called ten times a second.
        threads: returns the threads that the log names if they do not end.
        may_exit: whether the process exits when the time is over, and when a handler is given up. Pass False if the process runs
            other work, too: then it only logs that the time is over, and giving up a handler has no effect.
    """

    def __init__(
        self, requests: Callable[[], int], threads: Callable[[], Iterable[threading.Thread]], *, may_exit: bool = True
    ) -> None:
        super().__init__(name="outbox shutdown", daemon=True)
        self.requested = threading.Event()
        self._closed = threading.Event()
        self._requests = requests
        self._threads = threads
        self._may_exit = may_exit
        self._stops: list[Callable[[], object]] = []

    def on_request(self, stop: Callable[[], object]) -> None:
        """Call a function, which must not block, when the end is requested; if it was requested already, call it now."""
        self._stops.append(stop)
        if self.requested.is_set():
            stop()

    def start(self) -> None:
        """Start watching."""
        if self._may_exit:
            _exiting.add(self)
        super().start()

    def close(self) -> None:
        """Stop watching, because the work has ended."""
        self._closed.set()
        _exiting.discard(self)

    def run(self) -> None:
        """Wait for the request, call the functions of `on_request`, and exit the process if it does not end in time."""
        while not (self._requests() or self._has_given_up()):
            if self._closed.wait(POLL_SECONDS):
                return
        self.requested.set()
        for stop in list(self._stops):
            stop()
        ends_at = self._wait()
        if self._closed.is_set():
            if not self._may_exit:
                return
            threading.main_thread().join(LIMIT_SECONDS)
            if threading.main_thread().is_alive():  # another program has called the command, and continues
                return
            time.sleep(max(EXIT_SECONDS, ends_at - time.monotonic()))
        self._leave()

    def _has_given_up(self) -> bool:
        """Return whether the process has to exit, because a handler still runs long after its time limit."""
        return self._may_exit and bool(_given_up)

    def _wait(self) -> float:
        """Wait until the work has ended or the time is over; return the deadline."""
        began = time.monotonic()
        ends_at = began + LIMIT_SECONDS
        latest = float("inf")  # the deadline for handlers in other threads, once a handler was given up
        is_logged, request_count = False, self._requests()
        while not self._closed.wait(POLL_SECONDS) and time.monotonic() < ends_at:
            if not _in_handlers:
                request_count = self._requests()
                continue
            now = time.monotonic()
            if self._has_given_up():
                latest = min(latest, now + OTHERS_SECONDS)
            ends_at = min(now + LIMIT_SECONDS, latest)
            if not is_logged and now >= began + LIMIT_SECONDS:
                logger.warning("Waiting for a handler that still runs. To end without waiting for it, request the end again.")
                is_logged = True
            if is_logged and self._requests() > request_count:
                break
        return ends_at

    def _leave(self) -> None:
        """Log the calls that have not returned, and exit the process without them."""
        logging = threading.Thread(target=self._log_calls, daemon=True)
        logging.start()
        logging.join(LOG_SECONDS)
        if self._may_exit:
            os._exit(GIVEN_UP if _given_up else UNFINISHED)

    def _log_calls(self) -> None:
        effect = "This process ends without it" if self._may_exit else "This task cannot end before it returns"
        for thread in self._threads():
            if call := _current_call(thread):
                logger.warning(
                    "%s has not returned from %s. %s. Nothing is lost: other processes take over its work when its "
                    "connection breaks or its lease is over.",
                    thread.name,
                    call,
                    effect,
                )


class GracefulShutdown:
    """
    The graceful shutdown of a long-running command on SIGTERM or SIGINT; for the main thread only.

    Args:
        threads: threads that the log names, besides the main thread, if they do not end.
    """

    def __init__(self, threads: Iterable[threading.Thread] = ()) -> None:
        self._signals = 0
        self._watch = ShutdownWatch(lambda: self._signals, lambda: [*threads, threading.main_thread()])

    def __enter__(self) -> Self:
        self._old_handlers = {number: signal.signal(number, self._count) for number in (signal.SIGTERM, signal.SIGINT)}
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.close()
        if not self._signals:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)

    def wait(self, is_working: Callable[[], bool]) -> bool:
        """Wait until the end is requested, or `is_working` returns False; return whether it was requested."""
        while is_working() and not self._watch.requested.wait(POLL_SECONDS):
            pass
        return self._watch.requested.is_set()

    def _count(self, number: int, frame: FrameType | None) -> None:
        """Only count the signal, because a signal handler may interrupt any code, even code that holds an Event's lock."""
        self._signals += 1


def _current_call(thread: threading.Thread) -> str:
    """Return the function of the outbox that a thread executes, and the function that it waits in; "" if there is none."""
    frame = sys._current_frames().get(thread.ident or 0)
    innermost = frame
    while frame is not None and not _module(frame).startswith("outbox."):
        frame = frame.f_back
    if frame is None or innermost is None:
        return ""
    if _module(innermost) == "threading" and innermost.f_code.co_name in ("join", "_wait_for_tstate_lock"):
        return ""  # the thread only waits for another thread
    return _name(frame) if innermost is frame else f"{_name(frame)} (it waits in {_name(innermost)})"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _name(frame: FrameType) -> str:
    return f"{_module(frame)}.{frame.f_code.co_qualname}()"
