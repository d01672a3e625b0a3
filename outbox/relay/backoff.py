"""How long to wait before the next try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from random import random

Random = Callable[[], float]

MAX_DOUBLINGS = 32  # far behind every limit, and no overflow before it


@dataclass(frozen=True, slots=True)
class Backoff:
    """
    Exponential back-off with full jitter: anything from nothing to base x 2^tries, so that retries spread out.

    Args:
        base: the longest wait after the first failure.
        limit: no wait is longer.
        random: gives a number from 0 to below 1.
    """

    base: timedelta
    limit: timedelta
    random: Random = random

    def __call__(self, tries: int) -> timedelta:
        """Return the wait after one more failure, `tries` having failed before."""
        longest = min(self.limit, self.base * (1 << min(tries, MAX_DOUBLINGS)))
        return longest * self.random()
