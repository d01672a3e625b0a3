"""
Circuit breakers, one for each topic and one for the broker: during an outage no messages are claimed, so no attempts are used up.

While a topic gets no answer, only the breaker of this topic opens: the topic is skipped, and the others are sent. When the
breakers of several topics have opened, and no topic has got an answer meanwhile, the breaker of the broker opens, and nothing is
claimed.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

import msgspec

from outbox.outages import Backoff

MAX_NAMED_TOPICS = 3  # in the description of open breakers
NO_ANSWER = "The broker did not answer."
PROBE_SECONDS = 60.0  # a topic that is not probed within this time after its wait has nothing to send; `describe` omits it


class BreakerState(enum.StrEnum):
    """The state of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"  # the wait is over; one small send probes the topic or the broker


class Breaker:
    """
    A circuit breaker that opens after several batches in a row got no answer. Each failed probe doubles the longest wait.

    Args:
        threshold: the number of batches in a row without an answer that opens the breaker.
        backoff: returns how long the breaker stays open, given how often it has already opened since the last answer.
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
        """Whether the breaker is open, or its wait ended less than PROBE_SECONDS ago, so that a probe may still come."""
        return self._openings > 0 and self._clock() < self.open_until + PROBE_SECONDS

    @property
    def seconds_left(self) -> float:
        """The remaining wait, in seconds; 0 when closed."""
        return max(0.0, self.open_until - self._clock()) if self._openings else 0.0

    def record_answer(self) -> None:
        """Close the breaker, since there was an answer, even if it was an error."""
        self._failures = self._openings = 0

    def end_wait(self) -> None:
        """End the wait of an open breaker, so that a probe may be sent at once."""
        self.open_until = self._clock()

    def record_no_answer(self) -> bool:
        """Count a batch that got no answer; return whether that opened the breaker, or opened it again."""
        self._failures += 1
        if self._openings == 0 and self._failures < self._threshold:
            return False
        self.open()
        return True

    def open(self) -> None:
        """Open the breaker. The longest possible wait is twice that of the last time, up to the limit of the backoff."""
        wait = self._backoff(self._openings)
        self._openings += 1
        self.open_until = self._clock() + wait.total_seconds()


class Budget(msgspec.Struct):
    """
    How many bytes of bodies are sent to a broker in one call, or in one transaction, and are in memory at a time.

    A slow call halves the budget, or reduces it to half of what that call sent, so that after a timeout fewer messages are sent
    together. A fast call that used more than half of the budget doubles it.
    """

    size: int = 1024 * 1024

    MIN_SIZE, MAX_SIZE = 64 * 1024, 8 * 1024 * 1024
    FAST_SECONDS, SLOW_SECONDS = 0.5, 2.0  # the timeouts of brokers are 5 s and longer

    def adapt(self, size: int, seconds: float) -> None:
        """Adapt the budget to a call that sent `size` bytes and took `seconds`, whether or not it was answered."""
        if seconds > self.SLOW_SECONDS:
            self.size = max(self.MIN_SIZE, min(self.size, size) // 2)
        elif seconds < self.FAST_SECONDS and 2 * size > self.size:
            self.size = min(self.MAX_SIZE, 2 * self.size)


class Breakers:
    """
    The breakers of one broker and of its topics, and the budget of a call.

    Args:
        make: returns a new, closed breaker.
    """

    TOPICS = 3  # the broker's breaker opens with those of this many topics, if no topic gets an answer meanwhile

    def __init__(self, make: Callable[[], Breaker]) -> None:
        self.budget = Budget()
        self._make = make
        self._broker = make()
        self._topics: dict[str, Breaker] = {}  # the breakers of topics whose last send got no answer
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
        """The topics whose last send got no answer, in the order in which their waits end or have ended."""
        return [name for _, name in sorted((breaker.open_until, name) for name, breaker in list(self._topics.items()))]

    @property
    def open_topics(self) -> list[str]:
        """The topics whose breakers are open, so that their messages are not claimed now."""
        return [name for name, breaker in list(self._topics.items()) if breaker.state is BreakerState.OPEN]

    def describe(self) -> str:
        """Return the text for the column `Process.breaker`. It names a topic until the topic is probed after its wait."""
        names = sorted(name for name, breaker in list(self._topics.items()) if breaker.is_unanswered)
        if self.state is BreakerState.CLOSED and names:
            more = f" and {len(names) - MAX_NAMED_TOPICS} more" if len(names) > MAX_NAMED_TOPICS else ""
            return f"open for {', '.join(names[:MAX_NAMED_TOPICS])}{more}"
        return str(self.state)

    def is_probed(self, topic: str) -> bool:
        """Return whether to send one message of a topic first, because the topic or the broker did not answer the last send."""
        return topic in self._topics or self.state is BreakerState.HALF_OPEN

    def record_answer(self, topic: str) -> None:
        """Close the breakers of a topic and of the broker, since there was an answer, even if it was an error."""
        self._topics.pop(topic, None)
        self._reasons.pop(topic, None)
        self._unanswered.clear()
        if self.state is not BreakerState.CLOSED:  # the broker is back, so its other topics may be, too
            for breaker in list(self._topics.values()):
                breaker.end_wait()
        self._broker.record_answer()

    def reason(self, topic: str = "") -> str:
        """Return why the last send of a topic got no answer; if that is unknown, the reason of the topic that failed last."""
        return self._reasons.get(topic) or next(reversed(self._reasons.values()), NO_ANSWER)

    def record_no_answer(self, topic: str, reason: str = "") -> float:
        """
        Count a batch of a topic that got no answer, for the given reason.

        Returns:
            The seconds for which its topic, or the broker, is skipped, if this has opened a breaker; otherwise 0.
        """
        if reason:
            self._reasons.pop(topic, None)  # removed first, so that the new entry is the last one of the dict
            self._reasons[topic] = reason
        breaker = self._topics.setdefault(topic, self._make())
        is_opened = breaker.record_no_answer()
        if is_opened:
            self._unanswered.add(topic)
        is_probe = self.state is BreakerState.HALF_OPEN
        if is_probe or (self.state is BreakerState.CLOSED and len(self._unanswered) >= self.TOPICS):
            self._broker.open()
        return max(breaker.seconds_left, self.seconds_left) if is_opened or is_probe else 0.0
