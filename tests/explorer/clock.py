"""
The time of a schedule. Only the scheduler moves it, so that a lease is over when a schedule says so, and nobody sleeps.

In the database, `clock_timestamp()` and `statement_timestamp()` are functions of the explorer's schema, which comes first in the
search path. They read a sequence of microseconds; each call of the former takes the next number. In Python, `time.monotonic()`
is replaced for the threads of the schedule, before the framework is imported.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

SCHEMA = "explorer"

MAKE = f"""
CREATE SCHEMA {SCHEMA};
CREATE SEQUENCE {SCHEMA}.clock;
CREATE FUNCTION {SCHEMA}.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
$$ SELECT 'epoch'::timestamptz + nextval('{SCHEMA}.clock') * interval '1 microsecond' $$;
CREATE FUNCTION {SCHEMA}.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS
$$ SELECT 'epoch'::timestamptz + last_value * interval '1 microsecond' FROM {SCHEMA}.clock $$;
"""
MOVE = f"SELECT setval('{SCHEMA}.clock', last_value + %s) FROM {SCHEMA}.clock"
START = f"SELECT setval('{SCHEMA}.clock', %s)"

real_monotonic = time.monotonic


class Clock:
    """The time of Python's side of a schedule. `threads`: the ids of the threads that live in it."""

    def __init__(self) -> None:
        self.began = datetime.now(UTC)
        self.passed = timedelta()
        self.threads: set[int] = set()

    def start(self) -> int:
        """Begin a schedule now; return the microseconds since the epoch."""
        self.began, self.passed = datetime.now(UTC), timedelta()
        self.threads.clear()
        return int(self.began.timestamp() * 1_000_000)

    def now(self) -> datetime:
        """Return the time of the schedule."""
        return self.began + self.passed

    def monotonic(self) -> float:
        """Return the seconds since the schedule began; in other threads the machine's."""
        return 1_000 + self.passed.total_seconds() if threading.get_ident() in self.threads else real_monotonic()


CLOCK = Clock()


def install() -> None:
    """Replace `time.monotonic`, for what is imported later."""
    assert threading  # it keeps the real one
    time.monotonic = CLOCK.monotonic
