"""Send a day of orders while processes are killed, and wait until all work is done: a base class, and the demo's scenario."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from project.demo.feed import Feed
from project.demo.kills import LONG_RUNNING, ROUNDS, Kill, Permits, Round
from project.demo.outage import DOWN_SECONDS, BrokerKill
from project.demo.processes import Processes
from project.demo.screen import Screen

PACE_SECONDS = 0.08  # the interval of orders while a kill is planned
SLOW_PACE_SECONDS = 0.5  # the interval after a round has used up its share of the orders
REPORT_EVERY = 250  # invoices
KILL_SECONDS = 60  # the timeout of a planned kill


class BaseScenario:
    """
    Sends orders, grants kills, and waits until all work is done.

    Args:
        count_open: returns the number of unfinished messages and deliveries.
        settle_seconds: the timeout until there are none.
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

    def _feed_until(self, sent: int) -> None:
        """Send orders until the given number is sent, as fast as the shop accepts them."""
        while self.feed.sent < sent:
            self.processes.tend()
            self._send()
            if self.feed.sent % REPORT_EVERY == 0:
                self.screen.say(f"{self.feed.sent} invoices sent")

    def _feed_until_dead(self, kills: Iterable[Kill], until_sent: int) -> None:
        """Send orders until each of the kills has happened."""
        kills = list(kills)
        self._feed_while(lambda: not all(map(self.permits.is_used, kills)), until_sent, KILL_SECONDS)
        for kill in kills:
            if self.permits.revoke(kill):
                self.screen.say(f"not killed within {KILL_SECONDS} s: {self._words(kill)}")
            else:
                self.screen.say(f"killed {self._words(kill)}")

    def _feed_while(self, condition: Callable[[], bool], until_sent: int, seconds: float) -> None:
        """Send orders one by one while a condition holds, until a timeout."""
        deadline = time.monotonic() + seconds
        while condition() and time.monotonic() < deadline:
            self.processes.tend()
            if not self.feed.is_empty:
                self._send()
            time.sleep(PACE_SECONDS if self.feed.sent < until_sent else SLOW_PACE_SECONDS)

    def _settle(self) -> bool:
        """Wait until all work is done, and return whether it is. The report counts unfinished messages as lost."""
        deadline = time.monotonic() + self.settle_seconds
        while (is_open := bool(self.count_open())) and time.monotonic() < deadline:
            self.processes.tend()
            time.sleep(0.1)
        return not is_open

    def _end(self) -> None:
        is_done = self._settle()
        self.screen.say("all work is done" if is_done else f"unfinished after {self.settle_seconds} s: {self.count_open()}")

    def _send(self) -> None:
        self.feed.send_next()

    def _words(self, kill: Kill) -> str:
        return str(kill)


class Scenario(BaseScenario):
    """Plays the demo."""

    def play(self, rounds: Iterable[Round] = ROUNDS, broker_kill: BrokerKill | None = None) -> None:
        """
        Send all orders, with kills in between, and wait until all work is done.

        Args:
            broker_kill: kills the broker in the rounds with `kills_broker`.
        """
        rounds = list(rounds)
        share = len(self.feed.invoices) // (len(rounds) + 1)  # the last part of the day is quiet
        for number, round_ in enumerate(rounds, 1):
            self._play_round(round_, broker_kill, until_sent=number * share)
            self.screen.say(f"round {number} of {len(rounds)} is over, {self.feed.sent} invoices sent")
        self._feed_until(len(self.feed.invoices))
        self.screen.say(f"all {self.feed.sent} invoices sent")
        self._end()

    def _play_round(self, round_: Round, broker_kill: BrokerKill | None, until_sent: int) -> None:
        for kill in round_.consumers:
            self.permits.grant(kill)
        if broker_kill and round_.kills_broker:
            self._kill_broker(broker_kill, round_.consumers, until_sent)
        self.processes.hold(LONG_RUNNING)  # keep it dead after its kill, so that Celery's relay does the work
        self.permits.grant(round_.long_running)
        self._feed_until_dead([round_.long_running], until_sent)
        self.permits.grant(round_.celery)
        self._feed_until_dead([round_.celery], until_sent)
        self.processes.release(LONG_RUNNING)
        if not round_.kills_broker:
            self._feed_until_dead(round_.consumers, until_sent)
        self._feed_until(until_sent)

    def _kill_broker(self, broker_kill: BrokerKill, consumers: Sequence[Kill], until_sent: int) -> None:
        """Kill the broker while it has messages for dead consumers, send orders meanwhile, then start it and the consumers."""
        groups = [kill.process for kill in consumers]
        for group in groups:
            self.processes.hold(group)
        self._feed_until_dead(consumers, until_sent)
        self._feed_while(lambda: not broker_kill.is_due(groups), until_sent, KILL_SECONDS)
        if broker_kill.is_due(groups):
            before = self.feed.sent
            self.screen.say(broker_kill.kill(groups))
            self._feed_while(lambda: True, until_sent, DOWN_SECONDS)
            self.screen.say(broker_kill.start_again(self.feed.sent - before))
        else:
            self.screen.say(f"not killed within {KILL_SECONDS} s: the broker")
        for group in groups:
            self.processes.release(group)
