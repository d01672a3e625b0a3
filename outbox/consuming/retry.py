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
        limit: retries after the first failure; 0 for none. Only what the handler raises counts, not how often the message
            was delivered: docs/explanation/deliveries.md.
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
        if not isinstance(self.limit, int) or self.limit < 0 or not 0 <= self.jitter <= 1:
            raise ConfigurationError(
                f"Retry(limit={self.limit!r}, jitter={self.jitter}) is no policy: limit is a number from 0, jitter from 0 to 1."
            )
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in self.on):
            raise ConfigurationError(f"Retry(on={self.on!r}) is no policy: name types of errors.")
        object.__setattr__(self, "on", tuple(self.on))
        if not self.delays or not all(isinstance(one, timedelta) and one >= timedelta(0) for one in self.delays):
            raise ConfigurationError("Retry(delays=...) is no policy: name one timedelta at least, and none below zero.")

    def allows(self, failures: int) -> bool:
        """Return whether another try may follow so many failures."""
        return failures <= self.limit

    def delay(self, failures: int) -> timedelta:
        """Return the wait after so many failures (1 or more)."""
        base = self.delays[min(failures, len(self.delays)) - 1]
        return base * random.uniform(1 - self.jitter, 1 + self.jitter)  # noqa: S311
