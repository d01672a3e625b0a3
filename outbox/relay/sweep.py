"""
The sweep: what was decided long ago and still has open commits.

Where a second end does no harm, the commit is simply repeated; a half message that the broker has no more is sent again
(resend after discard). Elsewhere a COMMIT is sent once at most, so the check-back has the word until its horizon; behind it, the
broker is asked for the message itself: visible, it was sent; not there, it is sent again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from outbox.batches.batch import PreparedBatch
from outbox.brokers.base import Ended, SendResult, SendStatus
from outbox.brokers.capabilities import HalfMessages, Lookups
from outbox.database import Connection
from outbox.errors import BrokerUnavailable
from outbox.models import State
from outbox.relay.commit import CommitResult, Committer

logger = logging.getLogger(__name__)

BATCHES_AT_ONCE = 20

# Prepared batches of a broker from an age on; `after`, so that those which stay stuck starve nobody.
PREPARED = f"""
SELECT b.id, b.attempt, o.name, b.message_ids::text[], b.half_ids, b.open, b.split, b.tries,
       b.decided_at < clock_timestamp() - %(horizon)s
FROM outbox_batch b JOIN outbox_topic o ON o.id = b.topic_id AND o.broker = %(broker)s
WHERE b.state = {State.PREPARED} AND b.decided_at < clock_timestamp() - %(age)s AND b.id > %(after)s
ORDER BY b.id LIMIT %(limit)s
"""

SHOWN = frozenset({"visible", "delayed", "dead_letter"})
"""States of a found message that say: it reached its topic."""


UNANSWERED = SendResult(SendStatus.UNSURE, reason="Its commit was sent once at most, and is not repeated.")


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What a sweep did: batches looked at; messages found sent; messages that are sent again (resend after discard)."""

    batches: int
    sent: int
    returned: int


@dataclass(slots=True)
class Sweeper:
    """
    Goes through the decided batches of one broker, some at each call.

    Args:
        age: a batch decided more recently is still its relay's.
    """

    connection: Connection
    committer: Committer
    age: timedelta
    after: int = 0

    def sweep(self) -> SweepResult:
        """Settle the next decided batches; start again behind the last."""
        found = self._next()
        if self.committer.may_repeat_ends:
            ends = self.committer.commit([batch for batch, _ in found])
            for one, (_, is_past_horizon) in zip(ends, found, strict=True):
                if is_past_horizon:
                    # The broker has forgotten the half message, by a restore perhaps: nobody will end it any more.
                    self._look_up(one, [p for p, end in one.unanswered.items() if end.ended is Ended.NOT_FOUND])
        else:
            ends = [CommitResult(batch, unanswered=dict.fromkeys(batch.positions, UNANSWERED)) for batch, _ in found]
            for one in ends:
                self._look_up(one, list(one.unanswered))
        sent = self.committer.conclude(ends)
        return SweepResult(
            batches=len(ends),
            sent=sum(len(one.batch.positions) for one in ends if one.batch.id in sent),
            returned=sum(len(one.gone) for one in ends),
        )

    def _next(self) -> list[tuple[PreparedBatch, bool]]:
        """Give the next decided batches, and of each whether the broker asks no more about it."""
        broker = HalfMessages.of(self.committer.broker)
        arguments = {
            "horizon": broker.check_horizon,
            "broker": broker.alias,
            "age": self.age if self.committer.may_repeat_ends else broker.check_horizon,
            "after": self.after,
            "limit": BATCHES_AT_ONCE,
        }
        rows = self.connection.execute(PREPARED, arguments).fetchall()
        self.after = rows[-1][0] if len(rows) == BATCHES_AT_ONCE else 0
        return [(_prepared(row), row[8]) for row in rows]

    def _look_up(self, ends: CommitResult, positions: Sequence[int]) -> None:
        """Ask the broker for the messages themselves: one that is shown was committed, one that is not is gone."""
        for position in positions:
            half = ends.batch.half(position)
            message_id = half.message_id
            try:
                states = {found.state for found in Lookups.of(self.committer.broker).find(message_id, half=half)}
            except BrokerUnavailable as error:
                logger.warning("Message %s of batch %s cannot be looked up: %s", message_id, ends.batch.id, error)
                return
            del ends.unanswered[position]
            if not states & SHOWN:
                ends.gone[position] = "The broker shows no such message, and asks no more about its half message."


def _prepared(row: tuple[Any, ...]) -> PreparedBatch:
    batch_id, attempt, topic, message_ids, half_ids, open_positions, split, tries, _ = row
    left = range(1, len(message_ids) + 1) if open_positions is None else open_positions
    positions = [position for position in left if position not in split]
    return PreparedBatch(batch_id, attempt, topic, message_ids, half_ids, positions, tries)
