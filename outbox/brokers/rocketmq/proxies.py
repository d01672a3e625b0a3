"""
Which proxies to leave alone for a while: those that failed or were slow a moment ago, and those that asked for less.

A key that keeps order has one proxy, whatever that one is like; everybody else takes the best of those in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import random

from outbox.brokers.rocketmq.endpoints import Endpoint

# A call that took so many seconds has its proxy avoided for so many. Source: apache/rocketmq MQFaultStrategy.
SLOW = ((15.0, 30.0), (5.0, 10.0), (3.0, 6.0), (1.8, 5.0), (0.55, 2.0))
FAILED_SECONDS = 10.0  # there a failure counts as a call of 10 s

# Flow control: nothing is sent for 1 s, x 1.6 each time it is said again, to 120 s; +-20 %, so that senders spread out.
FIRST_SECONDS, GROWTH, MOST_SECONDS, JITTER = 1.0, 1.6, 120.0, 0.2
MOST_STEPS = 11  # 1.6 ** 11 is above 120


@dataclass(frozen=True, slots=True)
class Hold:
    """A proxy's wish to be sent nothing: how often it was said in a row, and till when it is kept."""

    times: int
    until: float


class Proxies:
    """
    Remembers how proxies fared.

    Args:
        clock: gives seconds; it never goes back.
        random: gives a number from 0 to below 1.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, random: Callable[[], float] = random) -> None:
        self._clock = clock
        self._random = random
        self._avoided: dict[str, float] = {}
        self._holds: dict[str, Hold] = {}

    def choose(self, endpoints: Sequence[Endpoint]) -> Endpoint:
        """Give the first that is free, or the one that will be soonest."""
        return min(endpoints, key=lambda endpoint: self._seconds_left(endpoint.target))

    def seconds_held(self, endpoint: Endpoint) -> float:
        """Say how long a proxy wants nothing."""
        hold = self._holds.get(endpoint.target)
        return max(0.0, hold.until - self._clock()) if hold else 0.0

    def note_answer(self, endpoint: Endpoint, seconds: float) -> None:
        """Note that a message was taken, after so long."""
        if not self.seconds_held(endpoint):
            self._holds.pop(endpoint.target, None)
        self._avoid(endpoint, next((wait for least, wait in SLOW if seconds >= least), 0.0))

    def note_failure(self, endpoint: Endpoint) -> None:
        """Note that a proxy, or the broker behind it, could not be reached or did not answer."""
        self._avoid(endpoint, FAILED_SECONDS)

    def note_flow_control(self, endpoint: Endpoint) -> float:
        """Note that a proxy asked for less; give the seconds that it is left alone, 0 where it has said so already."""
        if self.seconds_held(endpoint):
            return 0.0
        hold = self._holds.get(endpoint.target)
        times = hold.times + 1 if hold else 1
        wait = min(MOST_SECONDS, FIRST_SECONDS * GROWTH ** min(times - 1, MOST_STEPS))
        wait *= 1 - JITTER + 2 * JITTER * self._random()
        self._holds[endpoint.target] = Hold(times, self._clock() + wait)
        return wait

    def _avoid(self, endpoint: Endpoint, seconds: float) -> None:
        if seconds:
            self._avoided[endpoint.target] = self._clock() + seconds
        else:
            self._avoided.pop(endpoint.target, None)

    def _seconds_left(self, target: str) -> float:
        hold = self._holds.get(target)
        until = max(self._avoided.get(target, 0.0), hold.until if hold else 0.0)
        return max(0.0, until - self._clock())
