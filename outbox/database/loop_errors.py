"""
The last errors of the loops of this process, for its heartbeats, which status, metrics and the overview read.

A loop is noted with the error of its last step, and cleared by a step that succeeds. An outage of the database is not noted: it
keeps heartbeats away, too. Neither is a conflict, such as a deadlock, which the next step resolves.
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

# Each loop tries again within a minute after an error, and notes one that lasts. Older ones are forgotten: another process may
# have succeeded since, or there was nothing to do.
FORGET_SECONDS = 180.0

# The heartbeats of consumers and checkers carry the errors of these loops only, those of relays all others.
OF_CONSUMERS, OF_CHECKERS = {"consumer", "search for gaps"}, {"checker"}


class Loop(NamedTuple):
    """
    Identifies a loop. The heartbeats of its database, broker and group carry its error; "" stands for all of them.

    Args:
        name: the kind of work; of a process that does nothing else, the kind of its heartbeat.
        thread: tells the threads that do the same apart.
    """

    name: str
    database: str = ""
    broker: str = ""
    group: str = ""
    thread: str = ""


_lock = threading.Lock()
_errors: dict[Loop, tuple[str, float]] = {}  # the error, and when it came


def note(loop: Loop, error: Exception, text: str = "") -> bool:
    """
    Note what ended the last step of a loop, unless it passes by itself; return whether it was noted.

    Args:
        text: for operators, by default the first line of the error.
    """
    if passes_by_itself(error):
        return False
    text = text or str(error).strip().partition("\n")[0] or repr(error)
    with _lock:
        _errors[loop] = text, time.monotonic()
    return True


@contextmanager
def noting(loop: Loop) -> Iterator[None]:
    """Do a step of a loop in the block: note its error, which is raised, and clear the last one where it succeeds."""
    try:
        yield
    except Exception as error:
        note(loop, error)
        raise
    clear(loop)


def clear(loop: Loop) -> bool:
    """Forget the error of a loop, whose last step succeeded, or which has ended; return whether it had one."""
    if not _errors:  # fast path
        return False
    with _lock:
        return _errors.pop(loop, None) is not None


def read(kind: str, database: str, broker: str, group: str = "") -> dict[str, str]:
    """Return the errors for the heartbeat of a relay, consumer or checker (`kind`), by the name of their loop."""
    with _lock:
        noted = list(_errors.items())
    own = {"consumer": OF_CONSUMERS, "checker": OF_CHECKERS}.get(kind)
    return {
        loop.name: text
        for loop, (text, noted_at) in noted
        if (loop.name in own if own else loop.name not in OF_CONSUMERS | OF_CHECKERS)
        and loop.database in ("", database)
        and loop.broker in ("", broker)
        and loop.group in ("", group)
        and time.monotonic() - noted_at < FORGET_SECONDS
    }


def passes_by_itself(error: BaseException) -> bool:
    """Return whether the next step may succeed uncorrected: the database is away, not migrated yet, or had a conflict."""
    if isinstance(error, NotMigrated | LaneNotHeld):
        return True
    cause = error if isinstance(error, psycopg.Error) else error.__cause__  # Django's error has psycopg's as its cause
    return isinstance(cause, psycopg.Error) and not is_refusal(cause)
