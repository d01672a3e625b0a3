"""One message that goes half first: its transaction sends the half message, which this process ends (commits or rolls back)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

from django.db import connections
from msgspec.structs import replace

from outbox.batches.batch import ClaimedBatch
from outbox.batches.half_first import insert_prepared, mark_half_first_sent, store_half_first_place
from outbox.brokers.base import Broker, Ended, HalfRef, Outgoing, SendResult, SendStatus
from outbox.brokers.capabilities import HalfMessages
from outbox.errors import HalfNotStored
from outbox.failpoints import failpoint
from outbox.logs import get_logger, log_fields
from outbox.message import Resolution, TopicType
from outbox.relay.cloudevents import OutgoingBuilder

if TYPE_CHECKING:
    from outbox.publishing.draft import Draft

logger = get_logger(__name__)


class HalfFirstMessage:
    """
    A message that goes half first: its rows in the transaction, and its half message at the broker.

    The half message is committed only after the database commit, and rolled back only if the transaction certainly did not
    commit. Otherwise a check-back or the sweep ends it. Some brokers store a second copy for a second commit. On these, this
    process commits the half message only before `ends_until` of the batch, and other processes end it only after that time.

    Args:
        half_id: the id that the half message will have at the broker.
    """

    def __init__(self, broker: Broker, draft: Draft, using: str, *, half_id: str) -> None:
        self.half = HalfRef(draft.topic, half_id, str(draft.id))
        self.is_undone = False  # whether the transaction certainly does not commit
        self._broker = HalfMessages.of(broker)
        self._draft = draft
        self._using = using
        self._batch_id: int  # set by `prepare`
        self._began_at = 0.0  # just before `prepare` wrote the message row and the batch
        self._is_stored = False
        self._is_committed = False

    def prepare(self, topic: int, *, about: str | None) -> None:
        """
        Insert message row and batch in the transaction. The time within which this process may commit (`commit_window`) begins.

        Raises:
            HalfNotStored: the message has a tombstone. The transaction is aborted.
        """
        self._began_at = monotonic()
        window = self._broker.commit_window
        half_id = self.half.half_id
        self._batch_id, source = insert_prepared(self._draft, topic, self._using, half_id=half_id, about=about, window=window)
        self.half = replace(self.half, source=source)

    def send(self, *, about: str | None) -> None:
        """
        Send the half message.

        Raises:
            HalfNotStored: the broker did not confirm that the half message is stored. If it is, a check-back rolls it back.
        """
        refusal = f"{self._draft.subject} was not sent half first, so nothing was done. Broker {self._broker.alias!r}"
        try:
            [outcome] = self._broker.send_halves([self._outgoing(about)])
        except Exception as error:
            raise HalfNotStored(f"{refusal} raised {type(error).__name__}: {error}") from error
        if outcome.status is not SendStatus.ACCEPTED:
            raise HalfNotStored(f"{refusal} returned {outcome.status}: {outcome.reason}")
        self._is_stored = True
        self.half = replace(self.half, place=outcome.place)
        if outcome.place:  # another process may have to end the half message, and then needs the place
            with connections[self._using].cursor() as cursor:
                store_half_first_place(cursor, self._batch_id, outcome.place)

    @contextmanager
    def undone_by_an_exception(self) -> Iterator[None]:
        """Set `is_undone` if the block raises an exception, with which the transaction does not commit."""
        try:
            yield
        except BaseException:
            self.is_undone = True
            raise

    def commit(self) -> None:
        """Commit the half message; called after the database commit. Does nothing if the broker's `commit_window` is over."""
        self._is_committed = True
        failpoint("half_first.after_commit")
        window = self._broker.commit_window
        remaining = None if window is None else window - timedelta(seconds=monotonic() - self._began_at)
        if remaining is not None and remaining <= timedelta(0):
            logger.info(
                "The transaction of message %s ended after the broker's window; a check-back or sweep commits the half message.",
                self.half.message_id,
                extra=self._fields(),
            )
            return
        outcome = self._end(Resolution.COMMIT, within=remaining)
        failpoint("half_first.after_end")
        if outcome.status is SendStatus.ACCEPTED and outcome.ended is Ended.COMMITTED:
            with connections[self._using].cursor() as cursor:
                mark_half_first_sent(cursor, self._batch_id)
        else:
            logger.warning(
                "The half message of %s could not be committed yet; a check-back or a sweep does so: %s, %s %s",
                self.half.message_id,
                outcome.status,
                outcome.ended,
                outcome.reason,
                extra=self._fields(),
            )

    def settle(self) -> None:
        """Roll the half message back if it is stored and its transaction certainly did not commit; otherwise do nothing."""
        if self.is_undone and self._is_stored and not self._is_committed:
            try:
                self._end(Resolution.ROLLBACK)
            except Exception:  # only logged, so as not to replace the error that has undone the transaction
                text = "The half message of %s could not be rolled back; a check-back does so."
                logger.exception(text, self.half.message_id, extra=self._fields())

    def _fields(self) -> dict[str, Any]:
        return log_fields(
            message_id=self.half.message_id, topic=self._draft.topic, broker=self._draft.broker, database=self._using
        )

    def _outgoing(self, about: str | None) -> Outgoing:
        """Return the half message as a relay would send it, except that its token has batch id 0: the message goes half first."""
        draft = self._draft
        batch = ClaimedBatch(0, 1, draft.topic, TopicType.TRANSACTION, lane=None, first_seq=None, message_ids=[str(draft.id)])
        builder = OutgoingBuilder(batch, source=self.half.source, is_half=True)
        return builder.build(1, draft.key, draft.headers, about, draft.body, half_id=self.half.half_id)

    def _end(self, resolution: Resolution, *, within: timedelta | None = None) -> SendResult:
        [outcome] = self._broker.end([self.half], resolution, within=within)
        return outcome
