"""The circuit breaker: while the broker is unavailable, nothing is claimed, so an outage burns no attempts."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

from outbox.relay.backoff import Backoff


class BreakerState(enum.StrEnum):
    """As `Process.breaker` shows it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"  # the wait is over; one small send finds out


class Breaker:
    """
    Opens after some batches in a row that found the broker unavailable; each failed probe doubles the wait.

    Args:
        threshold: so many batches in a row open it.
        backoff: how long it stays open, by how often it has opened since the broker last answered.
        clock: gives seconds; it never goes back.
    """

    def __init__(self, threshold: int, backoff: Backoff, clock: Callable[[], float] = time.monotonic) -> None:
        self._threshold = threshold
        self._backoff = backoff
        self._clock = clock
        self._failures = 0
        self._openings = 0
        self._opens_until = 0.0

    @property
    def state(self) -> BreakerState:
        """How it stands now."""
        if self._openings == 0:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._opens_until else BreakerState.HALF_OPEN

    @property
    def seconds_left(self) -> float:
        """How long it stays open."""
        return max(0.0, self._opens_until - self._clock()) if self._openings else 0.0

    def note_answer(self) -> None:
        """Close: the broker answered, whatever it said."""
        self._failures = self._openings = 0

    def note_unavailable(self) -> bool:
        """Count a batch that found the broker unavailable; say whether that opened the breaker."""
        self._failures += 1
        if self._openings == 0 and self._failures < self._threshold:
            return False
        wait = self._backoff(self._openings)
        self._openings += 1
        self._opens_until = self._clock() + wait.total_seconds()
        return True
