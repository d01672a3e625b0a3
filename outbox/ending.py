"""
The end of a process: within 5 seconds of being asked for, whatever its threads wait for.

Whoever is asked to end finishes what was handed over and returns the rest. A server that is frozen answers neither, and a
call to it may never return. Then the process ends without that call. That loses nothing, for the same holds when it is
killed: a batch, a lane and a delivery are taken up by others when the connection is gone or the lease is over.

A consumer's handler is not ours to break off: as long as one runs, the 5 seconds have not begun, unless the end is asked for
once more.
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

LIMIT_SECONDS = 4.0  # from the request, or from the end of the last handler
EXIT_SECONDS = 0.5  # and so long after it for the interpreter, which waits for threads of libraries
LOOK_SECONDS = 0.1
LOG_SECONDS = 0.3  # a log may be stuck, too

UNFINISHED = 3
"""Exit code of a process that ended as told, and left a call that did not return."""

_in_handlers: set[int] = set()


def is_end_of_process(error: BaseException, *, is_asked: bool) -> bool:
    """
    Return whether an exception ends the process, wherever it was raised, rather than tells of what was being done.

    Args:
        is_asked: whether the end was asked for. A `sys.exit()` that nobody asked for is the fault of who called it.
    """
    if isinstance(error, KeyboardInterrupt):
        return threading.current_thread() is threading.main_thread()
    return isinstance(error, SystemExit) and (is_asked or _is_raised_by_signal(error))


def _is_raised_by_signal(error: BaseException) -> bool:
    """Return whether a signal's handler raised it, as in a child of Celery's prefork pool: `handler(signum, frame)`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in frames:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        values = [frame.f_locals.get(name) for name in names[-2:]]
        if len(values) == 2 and isinstance(values[0], int) and isinstance(values[1], FrameType):
            return True
    return False


@contextmanager
def handler_runs() -> Iterator[None]:
    """Mark that the calling thread runs a handler of the user's, which is not broken off."""
    thread = threading.get_ident()
    _in_handlers.add(thread)
    try:
        yield
    finally:
        _in_handlers.discard(thread)


class Watch(threading.Thread):
    """
    Watches over the end of a process, or of a task in it, from `start` to `close`.

    Args:
        requests: how often the end was asked for; looked at ten times a second.
        threads: those that are named in the log when they do not return.
        may_exit: whether the process is ours alone, and ends when time is over. Else that is only logged.
    """

    def __init__(
        self, requests: Callable[[], int], threads: Callable[[], Iterable[threading.Thread]], *, may_exit: bool = True
    ) -> None:
        super().__init__(name="outbox ending", daemon=True)
        self.asked = threading.Event()
        self._closed = threading.Event()
        self._requests = requests
        self._threads = threads
        self._may_exit = may_exit
        self._stops: list[Callable[[], object]] = []

    def when_asked(self, stop: Callable[[], object]) -> None:
        """Call a function, which must return at once, when the end is asked for; now, if it was."""
        self._stops.append(stop)
        if self.asked.is_set():
            stop()

    def close(self) -> None:
        """Note that all came to its end."""
        self._closed.set()

    def run(self) -> None:
        """Wait for the request, pass it on, and end the process where it has not ended in time."""
        while not self._requests():
            if self._closed.wait(LOOK_SECONDS):
                return
        self.asked.set()
        for stop in list(self._stops):
            stop()
        ends_at = self._wait()
        if self._closed.is_set():
            if not self._may_exit:
                return
            threading.main_thread().join(LIMIT_SECONDS)
            if threading.main_thread().is_alive():  # a command that another program called
                return
            time.sleep(max(EXIT_SECONDS, ends_at - time.monotonic()))
        self._leave()

    def _wait(self) -> float:
        """Wait until all came to its end, or time is over; return when it is."""
        began = time.monotonic()
        ends_at = began + LIMIT_SECONDS
        has_said, known = False, self._requests()
        while not self._closed.wait(LOOK_SECONDS) and time.monotonic() < ends_at:
            if not _in_handlers:
                known = self._requests()
                continue
            ends_at = time.monotonic() + LIMIT_SECONDS
            if not has_said and ends_at >= began + 2 * LIMIT_SECONDS:
                logger.warning("A handler still runs, and is waited for.")
                has_said = True
            if has_said and self._requests() > known:
                break
        return ends_at

    def _leave(self) -> None:
        """Return what does not return, and end the process without it."""
        telling = threading.Thread(target=self._tell, daemon=True)
        telling.start()
        telling.join(LOG_SECONDS)
        if self._may_exit:
            os._exit(UNFINISHED)

    def _tell(self) -> None:
        ends = "This process ends without it" if self._may_exit else "This task cannot end before it returns"
        for thread in self._threads():
            if place := _place(thread):
                logger.warning(
                    "%s has not returned from %s. %s, and nothing is lost: what it holds is taken up by others when its "
                    "connection is gone or its lease is over.",
                    thread.name,
                    place,
                    ends,
                )


class Ending:
    """
    The end of a resident command, which SIGTERM and SIGINT ask for; in the main thread only.

    Args:
        threads: those that are named in the log when they do not return, beside the main thread.
    """

    def __init__(self, threads: Iterable[threading.Thread] = ()) -> None:
        self._caught = 0
        self._watch = Watch(lambda: self._caught, lambda: [*threads, threading.main_thread()])

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._count) for number in (signal.SIGTERM, signal.SIGINT)}
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.close()
        if not self._caught:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def wait(self, is_working: Callable[[], bool]) -> bool:
        """Wait until the end is asked for, or nothing works any more; return whether it was asked for."""
        while is_working() and not self._watch.asked.wait(LOOK_SECONDS):
            pass
        return self._watch.asked.is_set()

    def _count(self, number: int, frame: FrameType | None) -> None:
        """Only count: a handler runs in the middle of anything, where setting an Event may wait for itself."""
        self._caught += 1


def _place(thread: threading.Thread) -> str:
    """Return what a thread of ours is in the middle of: our function, and whose it waits in; "" where it is in none."""
    frame = sys._current_frames().get(thread.ident or 0)
    innermost = frame
    while frame is not None and not _module(frame).startswith("outbox."):
        frame = frame.f_back
    if frame is None or innermost is None or _is_idle(innermost):
        return ""
    return _name(frame) if innermost is frame else f"{_name(frame)} (it waits in {_name(innermost)})"


def _is_idle(innermost: FrameType) -> bool:
    """Return whether it only waits for another thread."""
    return _module(innermost) == "threading" and innermost.f_code.co_name in ("join", "_wait_for_tstate_lock")


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _name(frame: FrameType) -> str:
    return f"{_module(frame)}.{frame.f_code.co_qualname}()"
