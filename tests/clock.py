"""A clock for what counts seconds."""

from dataclasses import dataclass


@dataclass
class Clock:
    """A clock in seconds, which a test advances."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now
