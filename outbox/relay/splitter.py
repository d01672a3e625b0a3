"""Return unaccepted messages to the queue, so that they are claimed again after a wait, or become dead; with alerts."""

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

ALERT_FAILURES = 10  # each time a batch has failed this many times more, an alert is sent


class Splitter(msgspec.Struct, frozen=True):
    """
    Returns, splits off and records messages that were not accepted. Each method may raise `FenceLost`, and has then done nothing.

    Args:
        retry: the backoff if the result of a send is unknown.
        misconfigured: the wait if an operator has to correct something.
    """

    connection: Connection
    retry: Backoff
    misconfigured: timedelta

    def return_batch(self, batch: ClaimedBatch, unaccepted: Mapping[int, Unaccepted]) -> None:
        """Release a claimed batch of which the broker has accepted no message; mark it dead if all its messages are."""
        runs_to_leave = runs(unaccepted)
        _, wait, error = max((run.reason.is_failure, self._wait(run, batch.failures), run.text) for run in runs_to_leave)
        is_counted, is_dead = any(run.is_counted for run in runs_to_leave), all(run.is_dead for run in runs_to_leave)
        with self.connection.transaction():
            dead = return_batch(self.connection, batch, wait=wait, error=error, is_counted=is_counted, is_dead=is_dead)
            self._record_failures(batch, runs_to_leave)
        notify_dead(dead)
        _send_alert(batch, runs_to_leave)

    def split(
        self,
        batch: ClaimedBatch | PreparedBatch,
        unaccepted: Mapping[int, Unaccepted],
        step: Callable[..., list[DeadNotice]],
        **more: Any,
    ) -> None:
        """Split positions off a batch, through a step of `batches/split.py`, which gets `more` arguments."""
        runs_to_leave = runs(unaccepted)
        waits = [self._wait(run, batch.failures) for run in runs_to_leave]
        with self.connection.transaction():
            dead = step(self.connection, batch, runs_to_leave, waits=waits, **more)
            self._record_failures(batch, runs_to_leave)
        notify_dead(dead)
        _send_alert(batch, runs_to_leave)

    def return_prepared(self, batch: PreparedBatch, gone: Unaccepted) -> None:
        """
        Release a decided batch of one message, whose half message no longer exists.

        The batch is released, or marked dead if nothing proves whether the message was published.
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
        if run.reason is SplitReason.MISCONFIGURED:
            return self.misconfigured
        # A half message that the broker discarded is sent again at once, but only the first time.
        is_repeated = run.reason is SplitReason.UNSURE or (run.reason is SplitReason.DISCARDED and failures > 0)
        return self.retry(failures) if is_repeated else timedelta(0)

    def _record_failures(self, batch: ClaimedBatch | PreparedBatch, runs_to_leave: Sequence[Run]) -> None:
        for run in runs_to_leave:
            if run.reason.is_failure:
                ids = batch.message_ids[run.lo - 1 : run.hi]
                record_failed_send(self.connection, batch.id, batch.attempt, ids, verdict=run.reason, reason=run.text)


def _send_alert(batch: ClaimedBatch | PreparedBatch, runs_to_leave: Sequence[Run]) -> None:
    """Send alerts for messages whose failure an operator has to correct, and for batches that have failed often."""
    for run in runs_to_leave:
        has_failed_often = run.is_counted and (batch.failures + 1) % ALERT_FAILURES == 0
        if run.reason is SplitReason.MISCONFIGURED or has_failed_often:
            details = {"batch": batch.id, "topic": batch.topic, "attempt": batch.attempt}
            extra = log_fields(
                batch=batch.id, topic=batch.topic, attempt=batch.attempt, message_ids=batch.message_ids[run.lo - 1 : run.hi]
            )
            text = "Attempt %(attempt)s to send batch %(batch)s of topic %(topic)s failed: %(reason)s"
            logger.error(text, details | {"reason": run.text}, extra=extra)
            signals.alert.send_robust(sender=Splitter, reason=run.text, details=details)
