"""
Circuit breakers, one for each topic and one for the broker: what is unavailable is not claimed, so an outage burns no attempts.

A breaker is as wide as the outage. One topic that gets no answer is left alone, and the others go on; when several topics get
none and no topic any, the broker is away.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

from outbox.relay.backoff import Backoff

NAMED = 3  # so many topics are named where breakers are described


class BreakerState(enum.StrEnum):
    """How a breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"  # the wait is over; one small send finds out


class Breaker:
    """
    Opens after some batches in a row that got no answer; each failed probe doubles the wait.

    Args:
        threshold: so many batches in a row open it.
        backoff: how long it stays open, by how often it has opened since the last answer.
        clock: gives seconds; it never goes back.
    """

    def __init__(self, threshold: int, backoff: Backoff, clock: Callable[[], float] = time.monotonic) -> None:
        self._threshold = threshold
        self._backoff = backoff
        self._clock = clock
        self._failures = 0
        self._openings = 0
        self.open_until = 0.0

    @property
    def state(self) -> BreakerState:
        """How it stands now."""
        if self._openings == 0:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self.open_until else BreakerState.HALF_OPEN

    @property
    def seconds_left(self) -> float:
        """How long it stays open."""
        return max(0.0, self.open_until - self._clock()) if self._openings else 0.0

    def note_answer(self) -> None:
        """Close: there was an answer, whatever it said."""
        self._failures = self._openings = 0

    def end_wait(self) -> None:
        """End the wait of an open breaker, so that the next probe may pass."""
        self.open_until = self._clock()

    def note_unavailable(self) -> bool:
        """Count a batch that got no answer; return whether that opened the breaker."""
        self._failures += 1
        if self._openings == 0 and self._failures < self._threshold:
            return False
        self.open()
        return True

    def open(self) -> None:
        """Open, twice as long as the last time."""
        wait = self._backoff(self._openings)
        self._openings += 1
        self.open_until = self._clock() + wait.total_seconds()


class Breakers:
    """
    The breakers of one broker and of its topics.

    Args:
        make: makes a closed breaker.
    """

    TOPICS = 3  # so many topics without an answer, and none with one in between: the broker is away

    def __init__(self, make: Callable[[], Breaker]) -> None:
        self._make = make
        self._broker = make()
        self._topics: dict[str, Breaker] = {}  # those that got no answer the last time
        self._silent: set[str] = set()  # those that have opened since any topic got an answer

    @property
    def state(self) -> BreakerState:
        """How the broker's stands now."""
        return self._broker.state

    @property
    def seconds_left(self) -> float:
        """How long the broker's stays open."""
        return self._broker.seconds_left

    @property
    def failed_topics(self) -> list[str]:
        """The topics that got no answer the last time, the one first that has waited longest for another try."""
        return [name for _, name in sorted((breaker.open_until, name) for name, breaker in list(self._topics.items()))]

    @property
    def open_topics(self) -> list[str]:
        """The topics that are not claimed now."""
        return [name for name, breaker in list(self._topics.items()) if breaker.state is BreakerState.OPEN]

    def describe(self) -> str:
        """Return what `Process.breaker` shows."""
        if self.state is BreakerState.CLOSED and (names := sorted(self.open_topics)):
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            return f"open for {', '.join(names[:NAMED])}{more}"
        return str(self.state)

    def is_probed(self, topic: str) -> bool:
        """Return whether one message of a topic goes ahead of its others."""
        breaker = self._topics.get(topic, self._broker)
        return BreakerState.HALF_OPEN in (self.state, breaker.state)

    def note_answer(self, topic: str) -> None:
        """Close: there was an answer about a topic, whatever it said."""
        self._topics.pop(topic, None)
        self._silent.clear()
        if self.state is not BreakerState.CLOSED:  # the broker is back, and so may be the others
            for breaker in list(self._topics.values()):
                breaker.end_wait()
        self._broker.note_answer()

    def note_unavailable(self, topic: str) -> float:
        """Count a batch of a topic that got no answer; return for how many seconds it, or the broker, is left alone now."""
        breaker = self._topics.setdefault(topic, self._make())
        is_opened = breaker.note_unavailable()
        if is_opened:
            self._silent.add(topic)
        is_probe = self.state is BreakerState.HALF_OPEN
        if is_probe or (self.state is BreakerState.CLOSED and len(self._silent) >= self.TOPICS):
            self._broker.open()
        return max(breaker.seconds_left, self.seconds_left) if is_opened or is_probe else 0.0
