"""
The last errors of this process's loops, which repeat work such as the maintenance. Heartbeats carry them to `status`, metrics and
the overview.

An error of a loop's step is recorded, and cleared by a step that succeeds. An outage of the database is not recorded, because no
heartbeat can be written then either. Neither is a conflict, such as a deadlock, which the next step resolves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psycopg

from outbox.database.connections import is_refusal
from outbox.errors import LaneNotHeld, NotMigrated
from outbox.logs import safe_text

# Records that are older are ignored. Each loop tries again within a minute after an error, so an error that lasts is recorded
# again by then; otherwise another process may have succeeded since, or there was nothing to do.
FORGET_SECONDS = 180.0

# The heartbeats of consumers and checkers carry only the errors of these loops, and heartbeats of relays all other errors.
OF_CONSUMERS, OF_CHECKERS = {"consumer", "search for gaps"}, {"checker"}


class Loop(NamedTuple):
    """
    Identifies a loop. Heartbeats of its database, broker and group carry its error; "" stands for all databases, brokers, groups.

    Args:
        name: the kind of work; for a process that does nothing else, the kind of its heartbeat.
        thread: distinguishes threads that do the same work.
    """

    name: str
    database: str = ""
    broker: str = ""
    group: str = ""
    thread: str = ""


_lock = threading.Lock()
_errors: dict[Loop, tuple[str, float]] = {}  # the error's text, and the monotonic time at which it was recorded


def record(loop: Loop, error: Exception, text: str = "") -> bool:
    """
    Record the error that ended the last step of a loop, unless it passes by itself; return whether it was recorded.

    Args:
        text: a text for operators, by default the first line of the error.
    """
    if passes_by_itself(error):
        return False
    text = text or safe_text(error).strip().partition("\n")[0] or repr(error)
    with _lock:
        _errors[loop] = text, time.monotonic()
    return True


@contextmanager
def recording(loop: Loop) -> Iterator[None]:
    """Run a step of a loop in the block. If it raises, the error is recorded and raised; otherwise the last one is cleared."""
    try:
        yield
    except Exception as error:
        record(loop, error)
        raise
    clear(loop)


def clear(loop: Loop) -> bool:
    """Remove the error of a loop whose last step succeeded, or which has ended; return whether there was one."""
    if not _errors:  # fast path
        return False
    with _lock:
        return _errors.pop(loop, None) is not None


def read(kind: str, database: str, broker: str, group: str = "") -> dict[str, str]:
    """Return the errors for the heartbeat of a relay, consumer or checker (`kind`), by the name of their loop."""
    with _lock:
        records = list(_errors.items())
    names = {"consumer": OF_CONSUMERS, "checker": OF_CHECKERS}.get(kind)
    return {
        loop.name: text
        for loop, (text, recorded_at) in records
        if (loop.name in names if names else loop.name not in OF_CONSUMERS | OF_CHECKERS)
        and loop.database in ("", database)
        and loop.broker in ("", broker)
        and loop.group in ("", group)
        and time.monotonic() - recorded_at < FORGET_SECONDS
    }


def passes_by_itself(error: BaseException) -> bool:
    """
    Return whether the next step may succeed without a correction.

    It may if the database is unreachable or not migrated yet, if another process held the lane, or after a conflict.
    """
    if isinstance(error, NotMigrated | LaneNotHeld):
        return True
    cause = error if isinstance(error, psycopg.Error) else error.__cause__  # Django's error has psycopg's as its cause
    return isinstance(cause, psycopg.Error) and not is_refusal(cause)
