"""
Release messages that the broker did not accept, so that they are claimed again after a wait, or mark them DEAD; send alerts.

A run is a range of adjacent positions in a batch with the same outcome (`batches/split.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from outbox import signals
from outbox.batches.batch import ClaimedBatch, PreparedBatch, SplitReason, Unaccepted
from outbox.batches.split import Run, runs
from outbox.batches.steps import DeadNotice, give_up_unproven, notify_dead, record_failed_send, resend_discarded, return_batch
from outbox.database import Connection
from outbox.logs import get_logger, log_fields
from outbox.outages import Backoff

logger = get_logger(__name__)

ALERT_FAILURES = 10  # an alert is sent whenever the number of a batch's failures reaches a multiple of this


class Splitter(msgspec.Struct, frozen=True):
    """
    Releases batches, or splits messages off them, and records why. A method that raises `FenceLost` has changed nothing.

    Args:
        retry: the backoff if the result of a send is unknown, or the broker has repeatedly discarded the half message.
        misconfigured_wait: the wait if an operator has to correct something.
    """

    connection: Connection
    retry: Backoff
    misconfigured_wait: timedelta

    def return_batch(self, batch: ClaimedBatch, unaccepted: Mapping[int, Unaccepted]) -> None:
        """Release a claimed batch of which the broker has accepted no message; mark it DEAD if all its messages are dead."""
        unaccepted_runs = runs(unaccepted)
        # The batch gets the wait and the text of one run: of those that failed, if any did, the one with the longest wait.
        _, wait, error = max((run.reason.is_failure, self._wait(run, batch.failures), run.text) for run in unaccepted_runs)
        is_counted, is_dead = any(run.is_counted for run in unaccepted_runs), all(run.is_dead for run in unaccepted_runs)
        with self.connection.transaction():
            dead = return_batch(self.connection, batch, wait=wait, error=error, is_counted=is_counted, is_dead=is_dead)
            self._record_failures(batch, unaccepted_runs)
        notify_dead(dead)
        _send_alert(batch, unaccepted_runs)

    def split(
        self,
        batch: ClaimedBatch | PreparedBatch,
        unaccepted: Mapping[int, Unaccepted],
        step: Callable[..., list[DeadNotice]],
        **arguments: Any,
    ) -> None:
        """Split the given positions off a batch. `step`: the function of `batches/split.py` to call with `arguments`."""
        unaccepted_runs = runs(unaccepted)
        waits = [self._wait(run, batch.failures) for run in unaccepted_runs]
        with self.connection.transaction():
            dead = step(self.connection, batch, unaccepted_runs, waits=waits, **arguments)
            self._record_failures(batch, unaccepted_runs)
        notify_dead(dead)
        _send_alert(batch, unaccepted_runs)

    def return_prepared(self, batch: PreparedBatch, gone: Unaccepted) -> None:
        """
        Release a decided batch of one message, whose half message no longer exists, so that the message is sent again.

        If nothing proves whether the message was published, mark the batch DEAD instead.
        """
        run = Run(1, 1, gone.reason, gone.text)
        dead: list[DeadNotice] = []
        with self.connection.transaction():
            if run.is_dead:
                dead = give_up_unproven(self.connection, batch, error=run.text)
            else:
                resend_discarded(self.connection, batch, wait=self._wait(run, batch.failures), error=run.text)
            self._record_failures(batch, [run])
        notify_dead(dead)
        _send_alert(batch, [run])

    def _wait(self, run: Run, failures: int) -> timedelta:
        """Return how long the messages of a run wait before they are claimed again, given the earlier failures of their batch."""
        if run.reason is SplitReason.MISCONFIGURED:
            return self.misconfigured_wait
        # A half message that the broker discarded is sent again at once, but only the first time.
        needs_backoff = run.reason is SplitReason.UNSURE or (run.reason is SplitReason.DISCARDED and failures > 0)
        return self.retry(failures) if needs_backoff else timedelta(0)

    def _record_failures(self, batch: ClaimedBatch | PreparedBatch, unaccepted_runs: Sequence[Run]) -> None:
        for run in unaccepted_runs:
            if run.reason.is_failure:
                ids = batch.message_ids[run.lo - 1 : run.hi]
                record_failed_send(self.connection, batch.id, batch.attempt, ids, verdict=run.reason, reason=run.text)


def _send_alert(batch: ClaimedBatch | PreparedBatch, unaccepted_runs: Sequence[Run]) -> None:
    """Send alerts for messages whose failure an operator has to correct, and for batches that have failed often."""
    for run in unaccepted_runs:
        has_failed_often = run.is_counted and (batch.failures + 1) % ALERT_FAILURES == 0
        if run.reason is SplitReason.MISCONFIGURED or has_failed_often:
            details = {"batch": batch.id, "topic": batch.topic, "attempt": batch.attempt}
            extra = log_fields(
                batch=batch.id, topic=batch.topic, attempt=batch.attempt, message_ids=batch.message_ids[run.lo - 1 : run.hi]
            )
            text = "Attempt %(attempt)s to send batch %(batch)s of topic %(topic)s failed: %(reason)s"
            logger.error(text, details | {"reason": run.text}, extra=extra)
            signals.alert.send_robust(sender=Splitter, reason=run.text, details=details)
