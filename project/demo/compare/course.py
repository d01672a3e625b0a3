"""The course of one day: send orders, kill processes, take RabbitMQ away for some seconds, and wait until all is done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from project.demo.compare.kills import OUTAGE_AFTER, in_words
from project.demo.feed import Feed
from project.demo.kills import Kill, Permits
from project.demo.processes import DemoError, Processes
from project.demo.scenario import BaseScenario
from project.demo.screen import Screen

OUTAGE_INVOICES = 5  # are sent while RabbitMQ is away


class Course(BaseScenario):
    """
    Plays one day.

    Args:
        rounds: the kills of each, which are granted together.
        take_away: kills RabbitMQ and starts it again, while the given function runs.
    """

    def __init__(
        self,
        processes: Processes,
        permits: Permits,
        feed: Feed,
        count_open: Callable[[], int],
        screen: Screen,
        *,
        rounds: Sequence[Collection[Kill]],
        take_away: Callable[[Callable[[], None]], None],
    ) -> None:
        super().__init__(processes, permits, feed, count_open, screen, settle_seconds=60)
        self.rounds = rounds
        self.take_away = take_away
        self.failed_requests = 0

    def play(self) -> None:
        """Send all orders, with kills in between, and wait until all work is done."""
        share = len(self.feed.invoices) // (len(self.rounds) + 1)  # the last part of the day is quiet
        for number, kills in enumerate(self.rounds, 1):
            for kill in kills:
                self.permits.grant(kill)
            self._feed_until_dead(kills, until_sent=number * share)
            self._feed_until(number * share)
            if number == OUTAGE_AFTER:
                self.take_away(self._send_in_outage)
                self._settle()  # so that the handlers which the next round kills are back
        self._feed_until(len(self.feed.invoices))
        self._end()

    def _send(self) -> None:
        """Send an invoice. A customer who sees an error does not try again."""
        try:
            super()._send()
        except DemoError:
            self.failed_requests += 1

    def _send_in_outage(self) -> None:
        """Send some invoices. It runs in a thread of its own, which starts no process: that would end with it."""
        failed, until = self.failed_requests, self.feed.sent + OUTAGE_INVOICES
        while self.feed.sent < until:
            self._send()
        text = f"killed RabbitMQ and sent {OUTAGE_INVOICES} invoices while it was away"
        self.screen.say(f"{text}: {self.failed_requests - failed} failed")

    def _words(self, kill: Kill) -> str:
        return in_words(kill)
