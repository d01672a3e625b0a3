"""When a message whose handler failed is delivered again, and when it is given up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from outbox.conf import RETRY_DELAYS
from outbox.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Retry:
    """
    Deliver a message again after its handler failed, then give it up as a dead letter.

    Args:
        limit: retries after the first attempt; 0 for none.
        delays: the wait before the first retry, the second, …; the last one serves all that follow.
        jitter: each wait is longer or shorter by up to this share of it (0 to 1), so that what failed together does
            not come back together.
        on: errors worth a retry; any other makes a dead letter at once.
    """

    limit: int = 16
    delays: Sequence[timedelta] = RETRY_DELAYS
    jitter: float = 0.1
    on: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if self.limit < 0 or not 0 <= self.jitter <= 1:
            raise ConfigurationError(
                f"Retry(limit={self.limit}, jitter={self.jitter}) is no policy: limit is 0 or more, jitter from 0 to 1."
            )
        if not self.delays or min(self.delays) < timedelta(0):
            raise ConfigurationError("Retry(delays=...) is no policy: name at least one delay, and none below zero.")

    def allows(self, attempt: int) -> bool:
        """Say whether another attempt may follow this one (the first is 1)."""
        return attempt <= self.limit

    def delay(self, attempt: int) -> timedelta:
        """Give the wait between this attempt (the first is 1) and the next."""
        base = self.delays[min(attempt, len(self.delays)) - 1]
        return base * random.uniform(1 - self.jitter, 1 + self.jitter)  # noqa: S311
