"""
Circuit breakers, one for each topic and one for the broker: messages are not claimed during an outage, so it uses up no attempts.

A breaker opens for as much as the outage affects. While one topic gets no answer, it is skipped and the others go on. When
several topics get no answer and no other topic gets one, the broker counts as unavailable.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

import msgspec

from outbox.outages import Backoff

NAMED_TOPICS = 3  # topics named in the description of open breakers
NO_ANSWER = "The broker did not answer."
PROBE_SECONDS = 60.0  # if a topic is not probed for this time after its wait, it has nothing to send


class BreakerState(enum.StrEnum):
    """The state of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"  # the wait is over; one small send probes the topic or the broker


class Breaker:
    """
    A circuit breaker that opens after several batches in a row got no answer. Each failed probe doubles the wait.

    Args:
        threshold: how many batches in a row open it.
        backoff: how long it stays open, by how often it has opened since the last answer.
        clock: a monotonic clock, in seconds.
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
        """The current state."""
        if self._openings == 0:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self.open_until else BreakerState.HALF_OPEN

    @property
    def is_unanswered(self) -> bool:
        """Whether the last send got no answer, and the next one is due."""
        return self._openings > 0 and self._clock() < self.open_until + PROBE_SECONDS

    @property
    def seconds_left(self) -> float:
        """The remaining wait, in seconds; 0 when closed."""
        return max(0.0, self.open_until - self._clock()) if self._openings else 0.0

    def note_answer(self) -> None:
        """Close the breaker: there was an answer, whatever it said."""
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
        """Open the breaker, for twice as long as the last time."""
        wait = self._backoff(self._openings)
        self._openings += 1
        self.open_until = self._clock() + wait.total_seconds()


class Budget(msgspec.Struct):
    """
    How many bytes of bodies go to a broker in one call, or in one transaction; they are also the most in memory at a time.

    A slow call halves it, so that messages that did not get through before their time-out are not sent again all together. A
    fast call that it has limited doubles it.
    """

    size: int = 1024 * 1024

    LEAST, MOST = 64 * 1024, 8 * 1024 * 1024
    FAST_SECONDS, SLOW_SECONDS = 0.5, 2.0  # brokers wait for 5 s and longer

    def note(self, size: int, seconds: float) -> None:
        """Note how long a call took for that many bytes, whether or not it was answered."""
        if seconds > self.SLOW_SECONDS:
            self.size = max(self.LEAST, min(self.size, size) // 2)
        elif seconds < self.FAST_SECONDS and 2 * size > self.size:
            self.size = min(self.MOST, 2 * self.size)


class Breakers:
    """
    The breakers of one broker and of its topics, and how much it takes at a time.

    Args:
        make: returns a new, closed breaker.
    """

    TOPICS = 3  # topics without an answer, and none with one in between, after which the broker counts as unavailable

    def __init__(self, make: Callable[[], Breaker]) -> None:
        self.budget = Budget()
        self._make = make
        self._broker = make()
        self._topics: dict[str, Breaker] = {}  # of topics whose last send got no answer
        self._reasons: dict[str, str] = {}  # topic -> why its last send got no answer
        self._unanswered: set[str] = set()  # topics whose breakers have opened since any topic got an answer

    @property
    def state(self) -> BreakerState:
        """The current state of the broker's breaker."""
        return self._broker.state

    @property
    def seconds_left(self) -> float:
        """The remaining wait of the broker's breaker, in seconds."""
        return self._broker.seconds_left

    @property
    def failed_topics(self) -> list[str]:
        """The topics whose last send got no answer; the first is the one that has waited longest for another try."""
        return [name for _, name in sorted((breaker.open_until, name) for name, breaker in list(self._topics.items()))]

    @property
    def open_topics(self) -> list[str]:
        """The topics that are not claimed for now."""
        return [name for name, breaker in list(self._topics.items()) if breaker.state is BreakerState.OPEN]

    def describe(self) -> str:
        """Return the text of `Process.breaker`, which is the same while topics wait for a probe and while they are probed."""
        names = sorted(name for name, breaker in list(self._topics.items()) if breaker.is_unanswered)
        if self.state is BreakerState.CLOSED and names:
            more = f" and {len(names) - NAMED_TOPICS} more" if len(names) > NAMED_TOPICS else ""
            return f"open for {', '.join(names[:NAMED_TOPICS])}{more}"
        return str(self.state)

    def is_probed(self, topic: str) -> bool:
        """Return whether one message of a topic is sent ahead of its others: its last send got no answer, or its broker none."""
        return topic in self._topics or self.state is BreakerState.HALF_OPEN

    def note_answer(self, topic: str) -> None:
        """Close the breakers of a topic and of the broker: there was an answer, whatever it said."""
        self._topics.pop(topic, None)
        self._reasons.pop(topic, None)
        self._unanswered.clear()
        if self.state is not BreakerState.CLOSED:  # the broker is back, so its other topics may be, too
            for breaker in list(self._topics.values()):
                breaker.end_wait()
        self._broker.note_answer()

    def reason(self, topic: str = "") -> str:
        """Return why the last send of a topic got no answer; where that is unknown, of the latest topic."""
        return self._reasons.get(topic) or next(reversed(self._reasons.values()), NO_ANSWER)

    def note_unavailable(self, topic: str, reason: str = "") -> float:
        """Count a batch that got no answer; return for how many seconds its topic, or the broker, is now skipped."""
        if reason:
            self._reasons.pop(topic, None)  # so that the latest is the last
            self._reasons[topic] = reason
        breaker = self._topics.setdefault(topic, self._make())
        is_opened = breaker.note_unavailable()
        if is_opened:
            self._unanswered.add(topic)
        is_probe = self.state is BreakerState.HALF_OPEN
        if is_probe or (self.state is BreakerState.CLOSED and len(self._unanswered) >= self.TOPICS):
            self._broker.open()
        return max(breaker.seconds_left, self.seconds_left) if is_opened or is_probe else 0.0
