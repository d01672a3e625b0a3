"""The course of the demo: orders come in, processes die, and in the end everything has to be right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from project.demo.feed import Feed
from project.demo.kills import RESIDENT, ROUNDS, Kill, Permits, Round
from project.demo.processes import Processes
from project.demo.screen import Screen

PACE_SECONDS = 0.08  # between two orders, while somebody is to die
SLOW_PACE_SECONDS = 0.5  # when a round has used up its share of the orders
SAY_EVERY = 250  # invoices
KILL_SECONDS = 60  # to wait for somebody's death


class Scenario:
    """
    Plays the demo.

    Args:
        count_open: counts what is still under way.
        settle_seconds: to wait until nothing is.
    """

    def __init__(
        self,
        processes: Processes,
        permits: Permits,
        feed: Feed,
        count_open: Callable[[], int],
        screen: Screen,
        settle_seconds: float = 40,
    ) -> None:
        self.processes = processes
        self.permits = permits
        self.feed = feed
        self.count_open = count_open
        self.screen = screen
        self.settle_seconds = settle_seconds

    def play(self, rounds: Iterable[Round] = ROUNDS) -> None:
        """Send all orders, with kills in between, and wait until nothing is under way."""
        rounds = list(rounds)
        share = len(self.feed.invoices) // (len(rounds) + 1)  # the last part of the day is quiet
        for number, round_ in enumerate(rounds, 1):
            self._play_round(round_, until_sent=number * share)
            self.screen.say(f"round {number} of {len(rounds)} is over, {self.feed.sent} invoices sent")
        self._feed_until(len(self.feed.invoices))
        self.screen.say(f"all {self.feed.sent} invoices sent")
        self._settle()

    def _play_round(self, round_: Round, until_sent: int) -> None:
        for kill in round_.consumers:
            self.permits.grant(kill)
        self.processes.hold(RESIDENT)  # so that Celery's relay has the work while it is dead
        self.permits.grant(round_.resident)
        self._feed_until_dead([round_.resident], until_sent)
        self.permits.grant(round_.celery)
        self._feed_until_dead([round_.celery], until_sent)
        self.processes.release(RESIDENT)
        self._feed_until_dead(round_.consumers, until_sent)
        self._feed_until(until_sent)

    def _feed_until(self, sent: int) -> None:
        """Send orders until so many are sent, as fast as the shop takes them."""
        while self.feed.sent < sent:
            self.processes.tend()
            self.feed.send_next()
            if self.feed.sent % SAY_EVERY == 0:
                self.screen.say(f"{self.feed.sent} invoices sent")

    def _feed_until_dead(self, kills: Iterable[Kill], until_sent: int) -> None:
        """Send orders until each of the kills has happened."""
        kills = list(kills)
        deadline = time.monotonic() + KILL_SECONDS
        while not all(map(self.permits.is_used, kills)) and time.monotonic() < deadline:
            self.processes.tend()
            if not self.feed.is_empty:
                self.feed.send_next()
            time.sleep(PACE_SECONDS if self.feed.sent < until_sent else SLOW_PACE_SECONDS)
        for kill in kills:
            if self.permits.revoke(kill):
                self.screen.say(f"not killed within {KILL_SECONDS} s: {kill}")
            else:
                self.screen.say(f"killed {kill}")

    def _settle(self) -> None:
        """Wait until nothing is under way. What is not done by the deadline, the report counts as lost."""
        deadline = time.monotonic() + self.settle_seconds
        while self.count_open() and time.monotonic() < deadline:
            self.processes.tend()
            time.sleep(0.1)
        left = self.count_open()
        self.screen.say(f"{left} things are still under way after {self.settle_seconds} s" if left else "nothing is under way")
