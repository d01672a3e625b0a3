"""
Chooses among proxies or brokers. Servers that failed, were slow or apply flow control are avoided for a while.

A message of a fifo topic goes to the proxy of its key, even if that proxy is avoided. Other messages go to an available server,
by round robin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import random

# (latency of a send, how long to avoid the server after it), in seconds. Source: apache/rocketmq MQFaultStrategy.
AVOIDANCE = ((15.0, 30.0), (5.0, 10.0), (3.0, 6.0), (1.8, 5.0), (0.55, 2.0))
FAILED_SECONDS = 10.0  # MQFaultStrategy counts a failure as a latency of 10 s

# The backoff under flow control: nothing is sent for 1 s, then 1.6 times as long each time, up to 3 s, with 20 % of jitter. A
# longer backoff would save little, since the first send after it is a cheap probe, and would leave a recovered server idle.
FIRST_SECONDS, GROWTH, MAX_SECONDS, JITTER = 1.0, 1.6, 3.0, 0.2
MAX_STEPS = 3  # 1.6 ** 3 is above 3
NO_BACKOFF = (0, 0.0)  # the number of backoffs in a row, and when the last one ends, by the clock


class FaultStrategy:
    """
    Records the faults of servers by name, as RocketMQ's MQFaultStrategy does.

    Args:
        clock: a monotonic clock in seconds.
        random: returns a number in [0, 1).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, random: Callable[[], float] = random) -> None:
        self._clock = clock
        self._random = random
        self._avoided_until: dict[str, float] = {}
        self._backoffs: dict[str, tuple[int, float]] = {}  # the values are like NO_BACKOFF

    def choose(self, names: Sequence[str]) -> str:
        """Return the first server that is not avoided, or the one that will be available soonest."""
        now = self._clock()
        return min(names, key=lambda name: max(self._avoided_until.get(name, 0.0) - now, self.backoff_seconds(name)))

    def backoff_seconds(self, name: str) -> float:
        """Return for how many more seconds nothing may be sent to a server, because it applied flow control; 0 if none."""
        _, until = self._backoffs.get(name, NO_BACKOFF)
        return max(0.0, until - self._clock())

    def record_answer(self, name: str, seconds: float) -> None:
        """Record that a server accepted a message, and how long that took."""
        if not self.backoff_seconds(name):
            self._backoffs.pop(name, None)
        self._avoid(name, next((wait for latency, wait in AVOIDANCE if seconds >= latency), 0.0))

    def record_failure(self, name: str) -> None:
        """Record that a server, or the broker that a proxy forwards to, could not be reached or did not answer."""
        self._avoid(name, FAILED_SECONDS)

    def record_flow_control(self, name: str) -> float:
        """Record that a server applied flow control. Return the seconds of a new backoff; 0 if one is in effect already."""
        if self.backoff_seconds(name):
            return 0.0
        steps, _ = self._backoffs.get(name, NO_BACKOFF)
        wait = min(MAX_SECONDS, FIRST_SECONDS * GROWTH ** min(steps, MAX_STEPS))
        wait *= 1 - JITTER + 2 * JITTER * self._random()
        self._backoffs[name] = steps + 1, self._clock() + wait
        return wait

    def _avoid(self, name: str, seconds: float) -> None:
        if seconds:
            self._avoided_until[name] = self._clock() + seconds
        else:
            self._avoided_until.pop(name, None)
