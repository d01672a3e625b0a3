"""When what was not accepted may be claimed again, and which failures an operator must know of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from outbox import signals
from outbox.batches.batch import Batch, PreparedBatch, SplitReason, Unaccepted
from outbox.batches.failures import DeadNotice, note_failure, notify_dead
from outbox.batches.give_up import give_up_unproven
from outbox.batches.release import return_batch
from outbox.batches.resend import resend_discarded
from outbox.batches.split import Run, runs, split
from outbox.database import Connection
from outbox.logs import get_logger, log_fields
from outbox.models import State
from outbox.relay.backoff import Backoff

logger = get_logger(__name__)

ALERT_TRIES = 10  # a batch that failed so often, and each further such number of times, is an operator's concern


@dataclass(frozen=True, slots=True)
class Splitter:
    """
    Writes down what was not accepted, with the waits that the settings give.

    Args:
        retry: back-off of what the broker left unsure.
        misconfigured: wait of what only an operator can set right.
    """

    connection: Connection
    retry: Backoff
    misconfigured: timedelta

    def return_batch(self, batch: Batch, unaccepted: Mapping[int, Unaccepted]) -> bool:
        """
        Return the messages of a claimed batch to their tickets, or mark them dead. The broker has accepted none of them.

        Returns:
            False when the fence was lost.
        """
        leaving = runs(unaccepted)
        wait, error = max((self._wait(run, batch.tries), run.text) for run in leaving)
        is_tried, is_dead = any(run.is_tried for run in leaving), all(run.is_dead for run in leaving)
        with self.connection.transaction():
            dead = return_batch(self.connection, batch, wait=wait, error=error, is_tried=is_tried, is_dead=is_dead)
            if dead is None:
                return False
            self._note(batch, leaving)
        notify_dead(dead)
        _send_alert(batch, leaving)
        return True

    def split(
        self,
        batch: Batch | PreparedBatch,
        unaccepted: Mapping[int, Unaccepted],
        *,
        state: State,
        next_state: State,
        half_ids: Sequence[str | None] | None = None,
        half_places: Mapping[int, str] | None = None,
        window: timedelta | None = None,
        open_positions: Sequence[int] | None = None,
    ) -> bool:
        """
        Split positions off a batch, as `batches.split.split` says.

        Returns:
            False when the fence was lost, or a position had been split off before.
        """
        leaving = runs(unaccepted)
        with self.connection.transaction():
            dead = split(
                self.connection,
                batch,
                leaving,
                waits=[self._wait(run, batch.tries) for run in leaving],
                state=state,
                next_state=next_state,
                half_ids=half_ids,
                half_places=half_places,
                window=window,
                open_positions=open_positions,
            )
            if dead is None:
                return False
            self._note(batch, leaving)
        notify_dead(dead)
        _send_alert(batch, leaving)
        return True

    def return_prepared(self, batch: PreparedBatch, gone: Unaccepted) -> bool:
        """
        Release a decided batch of one whose half message is no more; give it up where nobody can tell what became of it.

        Returns:
            False when the fence was lost.
        """
        run = Run(1, 1, gone.reason, gone.text)
        dead: list[DeadNotice] = []
        with self.connection.transaction():
            if run.is_dead:
                given_up = give_up_unproven(self.connection, batch, error=run.text)
                if given_up is None:
                    return False
                dead = given_up
            elif not resend_discarded(self.connection, batch, wait=self._wait(run, batch.tries), error=run.text):
                return False
            self._note(batch, [run])
        notify_dead(dead)
        _send_alert(batch, [run])
        return True

    def _wait(self, run: Run, tries: int) -> timedelta:
        if run.reason is SplitReason.MISCONFIGURED:
            return self.misconfigured
        # A half message that the broker dropped is sent again at once, but not round and round.
        is_repeated = run.reason is SplitReason.UNSURE or (run.reason is SplitReason.DISCARDED and tries > 0)
        return self.retry(tries) if is_repeated else timedelta(0)

    def _note(self, batch: Batch | PreparedBatch, leaving: Sequence[Run]) -> None:
        for run in leaving:
            if run.reason.is_failure:
                ids = batch.message_ids[run.lo - 1 : run.hi]
                note_failure(self.connection, batch.id, batch.attempt, ids, verdict=run.reason, reason=run.text)


def _send_alert(batch: Batch | PreparedBatch, leaving: Sequence[Run]) -> None:
    """Notify an operator of what only an operator can set right, and of what has failed suspiciously often."""
    for run in leaving:
        has_failed_often = run.is_tried and (batch.tries + 1) % ALERT_TRIES == 0
        if run.reason is SplitReason.MISCONFIGURED or has_failed_often:
            details = {"batch": batch.id, "topic": batch.topic, "tries": batch.tries + 1}
            extra = log_fields(
                batch=batch.id, topic=batch.topic, attempt=batch.attempt, message_ids=batch.message_ids[run.lo - 1 : run.hi]
            )
            text = "Batch %(batch)s of topic %(topic)s failed, try %(tries)s: %(reason)s"
            logger.error(text, details | {"reason": run.text}, extra=extra)
            signals.alert.send_robust(sender=Splitter, reason=run.text, details=details)
