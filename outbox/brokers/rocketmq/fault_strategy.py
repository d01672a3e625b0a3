"""
Which proxies and brokers to avoid for a while: those that failed or were slow, and those that apply flow control.

The keys of fifo topics have a fixed proxy all the same; other messages go to an available one, by round robin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import random

# (latency, avoid the server for), in seconds. Source: apache/rocketmq MQFaultStrategy.
SLOW = ((15.0, 30.0), (5.0, 10.0), (3.0, 6.0), (1.8, 5.0), (0.55, 2.0))
FAILED_SECONDS = 10.0  # MQFaultStrategy counts a failure as a latency of 10 s

# Flow control: nothing is sent for 1 s, then 1.6 times as long each time, up to 3 s, with 20 % of jitter. Longer would be a
# loss: the first send after the wait is a cheap probe, and a server that has recovered should not stay idle.
FIRST_SECONDS, GROWTH, MAX_SECONDS, JITTER = 1.0, 1.6, 3.0, 0.2
MAX_STEPS = 3  # 1.6 ** 3 is above 3
NO_BACKOFF = (0, 0.0)  # how many in a row, and until when by the clock


class FaultStrategy:
    """
    Remembers the faults of servers by name, as RocketMQ's MQFaultStrategy does.

    Args:
        clock: a monotonic clock in seconds.
        random: returns a number from 0 to below 1.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, random: Callable[[], float] = random) -> None:
        self._clock = clock
        self._random = random
        self._avoided: dict[str, float] = {}
        self._backoffs: dict[str, tuple[int, float]] = {}  # by flow control

    def choose(self, names: Sequence[str]) -> str:
        """Return the first server that is not avoided, or the one that will be available soonest."""
        now = self._clock()
        return min(names, key=lambda name: max(self._avoided.get(name, 0.0) - now, self.backoff_seconds(name)))

    def backoff_seconds(self, name: str) -> float:
        """Return for how many more seconds nothing is sent to a server that applied flow control."""
        _, until = self._backoffs.get(name, NO_BACKOFF)
        return max(0.0, until - self._clock())

    def note_answer(self, name: str, seconds: float) -> None:
        """Note that a server accepted a message after this time."""
        if not self.backoff_seconds(name):
            self._backoffs.pop(name, None)
        self._avoid(name, next((wait for least, wait in SLOW if seconds >= least), 0.0))

    def note_failure(self, name: str) -> None:
        """Note that a server, or the broker that a proxy forwards to, could not be reached or did not answer."""
        self._avoid(name, FAILED_SECONDS)

    def note_flow_control(self, name: str) -> float:
        """Note that a server applied flow control. Return for how many seconds nothing is sent to it; 0 if it is known."""
        if self.backoff_seconds(name):
            return 0.0
        steps, _ = self._backoffs.get(name, NO_BACKOFF)
        wait = min(MAX_SECONDS, FIRST_SECONDS * GROWTH ** min(steps, MAX_STEPS))
        wait *= 1 - JITTER + 2 * JITTER * self._random()
        self._backoffs[name] = steps + 1, self._clock() + wait
        return wait

    def _avoid(self, name: str, seconds: float) -> None:
        if seconds:
            self._avoided[name] = self._clock() + seconds
        else:
            self._avoided.pop(name, None)
