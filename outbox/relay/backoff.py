"""Exponential back-off with jitter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from random import random

Random = Callable[[], float]

MAX_DOUBLINGS = 32  # beyond every limit in use, and small enough not to overflow


@dataclass(frozen=True, slots=True)
class Backoff:
    """
    Exponential back-off with full jitter: a random wait between 0 and base x 2^failures, so that retries spread out.

    Args:
        base: the longest wait after the first failure.
        limit: the longest wait after any failure.
        random: returns a number from 0 to below 1.
    """

    base: timedelta
    limit: timedelta
    random: Random = random

    def __call__(self, failures: int) -> timedelta:
        """Return the wait after a failure that `failures` others preceded."""
        longest = min(self.limit, self.base * (1 << min(failures, MAX_DOUBLINGS)))
        return longest * self.random()
