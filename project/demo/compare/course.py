"""Play one day: send orders, kill processes, stop RabbitMQ for some seconds, and wait until all work is done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from project.demo.compare.kills import OUTAGE_AFTER, in_words
from project.demo.kills import Kill
from project.demo.processes import DemoError
from project.demo.scenario import BaseScenario

OUTAGE_INVOICES = 5  # invoices that are sent while RabbitMQ is down


class Course(BaseScenario):
    """
    Plays one day.

    Args:
        failed_requests: number of orders that the shop answered with an error.
    """

    failed_requests = 0

    def play(self, rounds: Sequence[Collection[Kill]], *, cause_outage: Callable[[Callable[[], None]], None]) -> None:
        """
        Send all orders, with kills in between, and wait until all work is done.

        Args:
            rounds: the kills of each round, which are permitted together.
            cause_outage: kills RabbitMQ and starts it again, while the given function runs.
        """
        share = len(self.feed.invoices) // (len(rounds) + 1)  # the last part of the day is quiet
        for number, kills in enumerate(rounds, 1):
            for kill in kills:
                self.permits.grant(kill)
            self._feed_until_dead(kills, until_sent=number * share)
            self._feed_until(number * share)
            if number == OUTAGE_AFTER:
                cause_outage(self._send_in_outage)
                self._settle()  # so that the processes of the next round's kills are running again
        self._feed_until(len(self.feed.invoices))
        self._end()

    def _send(self) -> None:
        """Send an invoice. After an error it is not sent again, as if the customer gave up."""
        try:
            super()._send()
        except DemoError:
            self.failed_requests += 1

    def _send_in_outage(self) -> None:
        """Send some invoices. This runs in another thread, so it must not start processes: they would end with the thread."""
        failed, until = self.failed_requests, self.feed.sent + OUTAGE_INVOICES
        while self.feed.sent < until:
            self._send()
        text = f"killed RabbitMQ and sent {OUTAGE_INVOICES} invoices while it was down"
        self.screen.say(f"{text}: {self.failed_requests - failed} failed")

    def _words(self, kill: Kill) -> str:
        return in_words(kill)
