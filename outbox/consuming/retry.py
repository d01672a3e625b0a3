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
    How often, and after which delays, a message is retried before it becomes a dead letter.

    Args:
        limit: number of retries after the first failure; 0 for none. Errors of the handler count, deliveries do not:
            docs/explanation/deliveries.md.
        delays: the delays before the first retry, the second, …; the last one is used for all further ones.
        jitter: each delay is randomly longer or shorter by up to this share (0 to 1), so that messages that failed together
            are not retried together.
        on: exceptions to retry; any other makes the message a dead letter at once.
    """

    limit: int = 16
    delays: Sequence[timedelta] = RETRY_DELAYS
    jitter: float = 0.1
    on: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if not isinstance(self.limit, int) or self.limit < 0 or not 0 <= self.jitter <= 1:
            raise ConfigurationError(
                f"Retry(limit={self.limit!r}, jitter={self.jitter}) is not valid: limit must be an integer from 0, jitter a "
                "number from 0 to 1."
            )
        if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in self.on):
            raise ConfigurationError(f"Retry(on={self.on!r}) is not valid: pass exception classes.")
        object.__setattr__(self, "on", tuple(self.on))
        if not self.delays or not all(isinstance(one, timedelta) and one >= timedelta(0) for one in self.delays):
            raise ConfigurationError("Retry(delays=...) is not valid: pass at least one timedelta, and none below zero.")

    def allows(self, failures: int) -> bool:
        """Return whether another delivery is allowed after a number of failures."""
        return failures <= self.limit

    def delay(self, failures: int) -> timedelta:
        """Return the delay after a number of failures (1 or more)."""
        base = self.delays[min(failures, len(self.delays)) - 1]
        return base * random.uniform(1 - self.jitter, 1 + self.jitter)  # noqa: S311
