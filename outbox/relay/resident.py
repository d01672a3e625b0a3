"""Residents: threads that do one thing until they are stopped, whatever becomes of database and broker meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import psycopg
from django.db import InterfaceError, OperationalError

from outbox.ending import Ending
from outbox.errors import BrokerUnavailable, LaneNotHeld, NotMigrated
from outbox.logs import get_logger, log_fields
from outbox.relay.backoff import Backoff
from outbox.relay.hosts import RelayRunner, RelayTarget, open_runner
from outbox.relay.rounds import RelayResult

logger = get_logger(__name__)

# After an outage no wait may be much of the 5 s in which the first message goes.
BACKOFF = Backoff(timedelta(milliseconds=200), timedelta(seconds=2))
UNFIT_SECONDS = 3.0  # a database without tables, or one that is not the primary yet, is looked at again so often
ALL_LANES_HELD_SECONDS = 1.0

OUTAGES = (psycopg.OperationalError, psycopg.InterfaceError, OperationalError, InterfaceError, BrokerUnavailable)


class Resident(threading.Thread):
    """
    Does `turn` again and again; an error is logged, and the next turn comes after a back-off.

    Args:
        turn: one turn of the work; says whether there is more to do at once.
        pause: seconds between turns.
        begins_after: seconds before the first one.
    """

    def __init__(self, name: str, turn: Callable[[], bool], *, pause: float, begins_after: float = 0) -> None:
        super().__init__(name=name, daemon=True)  # the process may end in the middle of a turn
        self.stopped = threading.Event()
        self._turn = turn
        self._pause = pause
        self._begins_after = begins_after
        self._troubles = 0
        self._waits_for = ""

    def run(self) -> None:
        """Work until stopped."""
        self.stopped.wait(self._begins_after)
        while not self.stopped.is_set():
            try:
                has_more = self._turn()
            except Exception as error:
                self.stopped.wait(self._explain(error))
                self._troubles += 1
            else:
                self._troubles = 0
                if not has_more:
                    self.stopped.wait(self._pause)

    def stop(self) -> None:
        """Ask the thread to end after this turn; from any thread."""
        self.stopped.set()

    def _explain(self, error: Exception) -> float:
        """Log what went wrong; return the seconds to wait."""
        wait = BACKOFF(self._troubles).total_seconds()
        if isinstance(error, NotMigrated | LaneNotHeld):
            if str(error) != self._waits_for:
                logger.warning("%s waits: %s", self.name, error)
            self._waits_for = str(error)
            return UNFIT_SECONDS if isinstance(error, NotMigrated) else ALL_LANES_HELD_SECONDS
        self._waits_for = ""
        if isinstance(error, OUTAGES):
            logger.warning("%s goes on in %.1f s: %s", self.name, wait, str(error).strip())
        else:
            logger.error("%s failed and goes on in %.1f s", self.name, wait, exc_info=error)
        return wait


class ResidentRelay(Resident):
    """A relay that runs until it is stopped."""

    def __init__(self, target: RelayTarget) -> None:
        super().__init__(f"Relay of {target}", self._run_relay, pause=0)
        self.target = target
        self.total = RelayResult()
        self._runner: RelayRunner | None = None

    def stop(self) -> None:
        """Ask the relay to finish what the broker has been handed, release the rest and leave; from any thread."""
        super().stop()
        if runner := self._runner:
            runner.stop()

    def _run_relay(self) -> bool:
        with open_runner(self.target, note="resident") as runner:
            self._runner = runner
            if self.stopped.is_set():  # before `stop` could see the runner
                runner.stop()
            extra = log_fields(database=self.target.database, broker=self.target.broker, lane=runner.relay.lane.number)
            logger.info("%s runs in lane %s", self.name, runner.relay.lane.number, extra=extra)
            self._troubles = 0
            try:
                runner.run()
                runner.deregister()
            finally:
                self.total.add(runner.relay.total)
                self._runner = None
        return True


def run_until_asked(residents: Sequence[Resident], ending: Ending) -> bool:
    """Run residents until the end is asked for, or one ends by itself; stop all, and return whether it was asked for."""
    for resident in residents:
        resident.start()
    is_asked = ending.wait(lambda: all(resident.is_alive() for resident in residents))
    for resident in residents:
        resident.stop()
    return is_asked
