"""
Which proxies and brokers to leave alone for a while: those that failed or were slow a moment ago, and those that asked for less.

A key that keeps order has one proxy, whatever that one is like; everybody else takes the best of those in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import random

# A call that took so many seconds has its server avoided for so many. Source: apache/rocketmq MQFaultStrategy.
SLOW = ((15.0, 30.0), (5.0, 10.0), (3.0, 6.0), (1.8, 5.0), (0.55, 2.0))
FAILED_SECONDS = 10.0  # there a failure counts as a call of 10 s

# Flow control: nothing is sent for 1 s, x 1.6 each time it is said again, to 3 s; +-20 %, so that senders spread out. Not
# longer: after it one small send asks whether it is over, and a server that has time again waits for no one.
FIRST_SECONDS, GROWTH, MOST_SECONDS, JITTER = 1.0, 1.6, 3.0, 0.2
MOST_STEPS = 3  # 1.6 ** 3 is above 3


@dataclass(frozen=True, slots=True)
class Hold:
    """A server's wish to be sent nothing: how often it was said in a row, and till when it is kept."""

    times: int
    until: float


class Avoidance:
    """
    Remembers how servers fared, each by its name.

    Args:
        clock: gives seconds; it never goes back.
        random: gives a number from 0 to below 1.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, random: Callable[[], float] = random) -> None:
        self._clock = clock
        self._random = random
        self._avoided: dict[str, float] = {}
        self._holds: dict[str, Hold] = {}

    def choose(self, names: Sequence[str]) -> str:
        """Return the first that is free, or the one that will be soonest."""
        return min(names, key=self._seconds_left)

    def seconds_held(self, name: str) -> float:
        """Return how long a server wants nothing."""
        hold = self._holds.get(name)
        return max(0.0, hold.until - self._clock()) if hold else 0.0

    def note_answer(self, name: str, seconds: float) -> None:
        """Note that a message was taken, after so long."""
        if not self.seconds_held(name):
            self._holds.pop(name, None)
        self._avoid(name, next((wait for least, wait in SLOW if seconds >= least), 0.0))

    def note_failure(self, name: str) -> None:
        """Note that a server, or the broker behind it, could not be reached or did not answer."""
        self._avoid(name, FAILED_SECONDS)

    def note_flow_control(self, name: str) -> float:
        """Note that a server asked for less; return the seconds that it is left alone, 0 where it has said so already."""
        if self.seconds_held(name):
            return 0.0
        hold = self._holds.get(name)
        times = hold.times + 1 if hold else 1
        wait = min(MOST_SECONDS, FIRST_SECONDS * GROWTH ** min(times - 1, MOST_STEPS))
        wait *= 1 - JITTER + 2 * JITTER * self._random()
        self._holds[name] = Hold(times, self._clock() + wait)
        return wait

    def _avoid(self, name: str, seconds: float) -> None:
        if seconds:
            self._avoided[name] = self._clock() + seconds
        else:
            self._avoided.pop(name, None)

    def _seconds_left(self, name: str) -> float:
        hold = self._holds.get(name)
        until = max(self._avoided.get(name, 0.0), hold.until if hold else 0.0)
        return max(0.0, until - self._clock())
