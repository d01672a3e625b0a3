"""
Repeat steps of work in spite of failures of the database or broker: in threads of a command, until they are stopped
(`RepeatingThread`), or one at a time, in a task that Celery beat starts (`try_step`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from django.db import connections

from outbox.errors import LaneNotHeld, NotMigrated
from outbox.logs import get_logger, log_fields, safe_text
from outbox.outages import BACKOFF, OUTAGES
from outbox.relay.hosts import RelayRunner, RelayTarget, open_runner
from outbox.relay.rounds import RelayResult
from outbox.shutdown import GracefulShutdown

logger = get_logger(__name__)

NOT_MIGRATED_SECONDS = 3.0  # wait if the database has no tables yet, or is not the primary yet
LANES_HELD_SECONDS = 1.0  # wait if other relays hold all lanes
MAX_ERROR_SECONDS = 60.0  # maximum wait after an error that is not an outage, for steps with longer pauses, such as maintenance


class RepeatingThread(threading.Thread):
    """
    A thread that repeats a step.

    It logs errors. After an outage it waits with exponential backoff; after any other error it waits for its pause (at most for
    MAX_ERROR_SECONDS) if that is longer.

    Args:
        step: does one step of the work, and returns True if there is more to do at once.
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
        """Work until stopped, and close this thread's connections."""
        try:
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
        finally:
            connections.close_all()

    def stop(self) -> None:
        """Ask the thread to end after this step; may be called from any thread."""
        self.stopped.set()

    def _log(self, error: Exception) -> float:
        """Log an error; return the seconds to wait."""
        wait = BACKOFF(self._failures).total_seconds()
        is_expected = isinstance(error, (*OUTAGES, NotMigrated, LaneNotHeld))
        effect = f"retries in {wait:.1f} s" if isinstance(error, OUTAGES) else "waits" if is_expected else "fails"
        text = safe_text(error).strip() or repr(error)
        level = logging.WARNING if is_expected else logging.ERROR
        logger.log(level, "%s %s: %s", self.name, effect, text, exc_info=None if is_expected else error)
        if isinstance(error, NotMigrated):
            return NOT_MIGRATED_SECONDS
        if isinstance(error, LaneNotHeld):
            return LANES_HELD_SECONDS
        return wait if isinstance(error, OUTAGES) else max(wait, min(self._pause, MAX_ERROR_SECONDS))


class RelayThread(RepeatingThread):
    """The thread of a long-running relay; `outbox_relay` runs one per target. `takes_over`: see `TransactionalSender`."""

    def __init__(self, target: RelayTarget, *, takes_over: bool = False) -> None:
        super().__init__(f"Relay of {target}", self._run_relay, pause=0)
        self.target = target
        self.total = RelayResult()
        self._takes_over = takes_over
        self._runner: RelayRunner | None = None

    def stop(self) -> None:
        """Ask the relay to finish the current send, release the remaining messages and end; may be called from any thread."""
        super().stop()
        if runner := self._runner:
            runner.stop()

    def _run_relay(self) -> bool:
        with open_runner(self.target, note="long-running", takes_over=self._takes_over) as runner:
            self._runner = runner
            if self.stopped.is_set():  # `stop` may have been called before it could see the runner
                runner.stop()
            extra = log_fields(database=self.target.database, broker=self.target.broker, lane=runner.relay.lane)
            logger.info("%s runs in lane %s.", self.name, runner.relay.lane, extra=extra)
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
    """
    Run threads until the process is asked to end, or one of them ends by itself; then stop all of them.

    Returns:
        Whether the process was asked to end.
    """
    for thread in threads:
        thread.start()
    is_asked = shutdown.wait(lambda: all(thread.is_alive() for thread in threads))
    for thread in threads:
        thread.stop()
    return is_asked


def try_step(step: Callable[..., object], *args: Any, **options: Any) -> bool:
    """Run a step; log an error instead of raising it, so that further steps run. Return whether the step succeeded."""
    try:
        step(*args, **options)
        return True
    except LaneNotHeld as error:
        logger.debug("%s", error)  # expected, since other relays do the work
    except NotMigrated as error:
        logger.info("%s", error)
    except OUTAGES as error:
        logger.warning("%s failed for now: %s", step.__qualname__, str(error).strip())
    except Exception as error:
        logger.exception("%s failed: %s", step.__qualname__, safe_text(error).strip() or repr(error))
    return False
