"""The course of one day: send orders, kill processes, take RabbitMQ away for some seconds, and wait until all is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from project.demo.compare.kills import OUTAGE_AFTER, in_words
from project.demo.feed import Feed
from project.demo.kills import Kill, Permits
from project.demo.processes import DemoError, Processes
from project.demo.scenario import KILL_SECONDS, PACE_SECONDS, SLOW_PACE_SECONDS
from project.demo.screen import Screen

OUTAGE_INVOICES = 5  # are sent while RabbitMQ is away
SETTLE_SECONDS = 60


class Course:
    """
    Plays one day.

    Args:
        rounds: the kills of each, which are granted together.
        take_away: kills RabbitMQ and starts it again, while the given function runs.
        count_open: counts what is still under way.
    """

    def __init__(
        self,
        processes: Processes,
        permits: Permits,
        feed: Feed,
        screen: Screen,
        *,
        rounds: Sequence[Collection[Kill]],
        take_away: Callable[[Callable[[], None]], None],
        count_open: Callable[[], int],
    ) -> None:
        self.processes = processes
        self.permits = permits
        self.feed = feed
        self.screen = screen
        self.rounds = rounds
        self.take_away = take_away
        self.count_open = count_open
        self.failed_requests = 0

    def play(self) -> None:
        """Send all orders, with kills in between, and wait until all work is done."""
        share = len(self.feed.invoices) // (len(self.rounds) + 1)  # the last part of the day is quiet
        for number, kills in enumerate(self.rounds, 1):
            self._kill(kills, until_sent=number * share)
            self._send_until(number * share)
            if number == OUTAGE_AFTER:
                self.take_away(self._send_in_outage)
                self._settle()  # so that the handlers which the next round kills are back
        self._send_until(len(self.feed.invoices))
        self.screen.say("all work is done" if self._settle() else f"unfinished after {SETTLE_SECONDS} s: {self.count_open()}")

    def _send(self) -> None:
        """Send an invoice. A customer who sees an error does not try again."""
        try:
            self.feed.send_next()
        except DemoError:
            self.failed_requests += 1

    def _send_until(self, sent: int) -> None:
        while self.feed.sent < sent:
            self.processes.tend()
            self._send()

    def _send_in_outage(self) -> None:
        """Send some invoices. It runs in a thread of its own, which starts no process: that would end with it."""
        failed, until = self.failed_requests, self.feed.sent + OUTAGE_INVOICES
        while self.feed.sent < until:
            self._send()
        text = f"killed RabbitMQ and sent {OUTAGE_INVOICES} invoices while it was away"
        self.screen.say(f"{text}: {self.failed_requests - failed} failed")

    def _kill(self, kills: Collection[Kill], until_sent: int) -> None:
        """Send orders until each of the kills has happened."""
        for kill in kills:
            self.permits.grant(kill)
        deadline = time.monotonic() + KILL_SECONDS
        while not all(map(self.permits.is_used, kills)) and time.monotonic() < deadline:
            self.processes.tend()
            if not self.feed.is_empty:
                self._send()
            time.sleep(PACE_SECONDS if self.feed.sent < until_sent else SLOW_PACE_SECONDS)
        for kill in kills:
            if self.permits.revoke(kill):
                self.screen.say(f"not killed within {KILL_SECONDS} s: {in_words(kill)}")
            else:
                self.screen.say(f"killed {in_words(kill)}")

    def _settle(self) -> bool:
        """Wait until all work is done, and return whether it is. The report counts the rest as lost."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (is_open := bool(self.count_open())) and time.monotonic() < deadline:
            self.processes.tend()
            time.sleep(0.2)
        return not is_open
