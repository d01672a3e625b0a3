"""
Steps that are repeated, and outlast failures of database and broker: by threads until they are stopped (`RepeatingThread`), or by
a task of Celery's beat, which does one at a time (`try_step`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from outbox.errors import LaneNotHeld, NotMigrated
from outbox.logs import get_logger, log_fields
from outbox.outages import BACKOFF, OUTAGES
from outbox.relay.hosts import RelayRunner, RelayTarget, open_runner
from outbox.relay.rounds import RelayResult
from outbox.shutdown import GracefulShutdown

logger = get_logger(__name__)

NOT_MIGRATED_SECONDS = 3.0  # wait for a database without tables, or one that is not the primary yet
LANES_HELD_SECONDS = 1.0
MAX_REFUSED_SECONDS = 60.0  # wait of a step with longer pauses, such as the maintenance, before it tries again what was refused


class RepeatingThread(threading.Thread):
    """
    A thread that repeats a step. After an error, which it logs, it waits with exponential back-off; after one that is
    not an outage at least for its pause, and at most a minute.

    Args:
        step: one step of the work; returns True where there is more to do at once.
        pause: seconds between steps.
        begins_after: seconds before the first step.
    """

    def __init__(self, name: str, step: Callable[[], object], *, pause: float, begins_after: float = 0) -> None:
        super().__init__(name=name, daemon=True)  # the process may end in the middle of a step
        self.stopped = threading.Event()
        self._step = step
        self._pause = pause
        self._begins_after = begins_after
        self._failures = 0

    def run(self) -> None:
        """Work until stopped."""
        self.stopped.wait(self._begins_after)
        while not self.stopped.is_set():
            try:
                has_more = self._step() is True
            except Exception as error:
                self.stopped.wait(self._log(error))
                self._failures += 1
            else:
                self._failures = 0
                if not has_more:
                    self.stopped.wait(self._pause)

    def stop(self) -> None:
        """Ask the thread to end after this step; may be called from any thread."""
        self.stopped.set()

    def _log(self, error: Exception) -> float:
        """Log an error; return the seconds to wait."""
        wait = BACKOFF(self._failures).total_seconds()
        is_expected = isinstance(error, (*OUTAGES, NotMigrated, LaneNotHeld))
        does = f"retries in {wait:.1f} s" if isinstance(error, OUTAGES) else "waits" if is_expected else "fails"
        text = str(error).strip() or repr(error)
        level = logging.WARNING if is_expected else logging.ERROR
        logger.log(level, "%s %s: %s", self.name, does, text, exc_info=None if is_expected else error)
        if isinstance(error, NotMigrated):
            return NOT_MIGRATED_SECONDS
        if isinstance(error, LaneNotHeld):
            return LANES_HELD_SECONDS
        return wait if isinstance(error, OUTAGES) else max(wait, min(self._pause, MAX_REFUSED_SECONDS))


class RelayThread(RepeatingThread):
    """A long-running relay: `outbox_relay` runs one per target. `takes_over`: as for `TransactionalSender`."""

    def __init__(self, target: RelayTarget, *, takes_over: bool = False) -> None:
        super().__init__(f"Relay of {target}", self._run_relay, pause=0)
        self.target = target
        self.total = RelayResult()
        self._takes_over = takes_over
        self._runner: RelayRunner | None = None

    def stop(self) -> None:
        """Ask the relay to finish the sends under way, release the rest and end; may be called from any thread."""
        super().stop()
        if runner := self._runner:
            runner.stop()

    def _run_relay(self) -> bool:
        with open_runner(self.target, note="long-running", takes_over=self._takes_over) as runner:
            self._runner = runner
            if self.stopped.is_set():  # before `stop` could see the runner
                runner.stop()
            extra = log_fields(database=self.target.database, broker=self.target.broker, lane=runner.relay.lane)
            logger.info("%s runs in lane %s", self.name, runner.relay.lane, extra=extra)
            try:
                runner.run()
                runner.deregister()
            finally:
                if runner.has_worked:
                    self._failures = 0
                self.total.add(runner.relay.total)
                self._runner = None
        return True


def run_until_stopped(threads: Sequence[RepeatingThread], shutdown: GracefulShutdown) -> bool:
    """Run threads until the process is asked to end, or one ends by itself; stop all; return whether it was asked."""
    for thread in threads:
        thread.start()
    is_asked = shutdown.wait(lambda: all(thread.is_alive() for thread in threads))
    for thread in threads:
        thread.stop()
    return is_asked


def try_step(step: Callable[..., object], *args: Any, **options: Any) -> bool:
    """Run a step; log an error, so that the next steps are not left out. Return whether it succeeded."""
    try:
        step(*args, **options)
        return True
    except LaneNotHeld as error:
        logger.debug("%s", error)  # other relays are at work
    except NotMigrated as error:
        logger.info("%s", error)
    except OUTAGES as error:
        logger.warning("%s failed for now: %s", step.__qualname__, str(error).strip())
    except Exception as error:
        logger.exception("%s failed: %s", step.__qualname__, str(error).strip() or repr(error))
    return False
