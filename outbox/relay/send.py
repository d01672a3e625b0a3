"""
Load the messages of claimed batches, in slices of limited size, and send them to the broker.

One-phase and two-phase sends differ only in the broker's method, and in the token of half messages. On ordered topics, a message
is sent only after the answer for the previous message of its key; after a failure, no more messages of that key are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter
from time import monotonic
from typing import Any, TypeAlias

import msgspec
import psycopg
from psycopg.rows import tuple_row

from outbox import signals, tracing
from outbox.batches.batch import BatchSendResult, ClaimedBatch, SplitReason, Unaccepted
from outbox.brokers.base import Broker, Outgoing, SendResult, SendStatus
from outbox.brokers.capabilities import HalfMessages
from outbox.database import Connection
from outbox.logs import error_text, get_logger, log_fields
from outbox.relay.breaker import Breakers, BreakerState, Budget
from outbox.relay.cloudevents import OutgoingBuilder

# The messages of batches, from a position of the first batch on, until the size of their bodies reaches the limit; at least one
# message. Message ids are read from the batches, since sending them as parameters would cost more than the result. The sub-SELECT
# hides the number of batches from the planner, so that one plan serves any number. A message whose row is gone has NULLs.
# octet_length() does not read a body that is TOASTed.
ROWS = """
SELECT batch_id, position, key, headers, about, body FROM (
    SELECT given.n, batch.id AS batch_id, message_id.position, message.key, message.headers, message.about, message.body,
        sum(octet_length(message.body)) OVER in_order AS size, row_number() OVER in_order AS nth
    FROM unnest((SELECT %s::bigint[])) WITH ORDINALITY given(id, n)
    JOIN outbox_batch batch ON batch.id = given.id,
    unnest(batch.message_ids) WITH ORDINALITY message_id(id, position)
    LEFT JOIN outbox_message message ON message.id = message_id.id
    WHERE given.n > 1 OR message_id.position >= %s
    WINDOW in_order AS (ORDER BY given.n, message_id.position ROWS UNBOUNDED PRECEDING)) sized
WHERE nth = 1 OR coalesce(size, 0) <= %s
ORDER BY n, position
"""

Row: TypeAlias = tuple[int, int, str, str | None, str | None, bytes]
"""
A message: the id of its batch, its position, key, headers, about and body.

All but the first two are None if the message row is gone.
"""

_batch_id = itemgetter(0)


Loaded: TypeAlias = tuple[ClaimedBatch, Sequence[Row]]  # a batch, and rows of its messages in order


def slices(connection: Connection, batches: Sequence[ClaimedBatch], budget: Budget) -> Iterator[list[Loaded]]:
    """
    Yield the messages of batches in order, slice by slice; read them from the database unless the claim has loaded them.

    A batch whose row is gone yields nothing.

    Args:
        budget: limits the size of all bodies in a slice. It may change from slice to slice. A larger body is a slice by itself.
    """
    if all(batch.messages is not None for batch in batches):
        rows = [(batch.id, n, *message) for batch in batches for n, message in enumerate(batch.messages or (), 1)]
        if sum(len(body or b"") for *_, body in rows) <= budget.size:
            yield list(by_batch(rows, batches))
            return
    waiting, begin = list(batches), 1
    # Not connection.cursor(): in tests it returns Django's cursor, which cannot read bodies in binary format.
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        while waiting:
            arguments = [[batch.id for batch in waiting], begin, budget.size]
            rows = cursor.execute(ROWS, arguments, binary=True).fetchall()
            if not rows:
                return
            if loaded := list(by_batch(rows, waiting)):
                yield loaded
            last_id, last_position, *_ = rows[-1]
            while waiting[0].id != last_id:
                waiting.pop(0)
            begin = last_position + 1
            if last_position == len(waiting[0].message_ids):
                waiting, begin = waiting[1:], 1


def by_batch(rows: Iterable[Row], batches: Iterable[ClaimedBatch]) -> Iterator[Loaded]:
    """Group rows, sorted by batch, by their batches; leave out positions that were split off."""
    by_id = {batch.id: batch for batch in batches}
    for batch_id, group in groupby(rows, _batch_id):
        batch, members = by_id[batch_id], list(group)
        if batch.split:
            members = [row for row in members if row[1] not in batch.split]
        if members:
            yield batch, members


logger = get_logger(__name__)

SHIFT_PER_FAILURE, MAX_SHIFT = 2, 16  # bits. A batch that has failed is sent in quarters, then in quarters of these, and so on

ANSWERS = (SendStatus.ACCEPTED, SendStatus.REFUSED, SendStatus.MISCONFIGURED)  # the broker has answered

OrderKey: TypeAlias = tuple[int, int]  # the id of a batch, and an order key; two topics may have equal order keys

ROW_GONE = "Its message row is gone. Restore it from a backup or an archive, or discard the message."


@dataclass(slots=True)
class Sender:
    """
    Sends batches to one broker.

    Args:
        source: the stable id of the database.
        is_stopping: returns whether the relay has to stop, so that messages that are not sent yet are released.
        clock: a monotonic clock, in seconds.
        unanswered: id of a batch whose topic got no answer in the last call; None if all topics got one.
    """

    connection: Connection
    broker: Broker
    breakers: Breakers
    source: str
    is_stopping: Callable[[], bool]
    clock: Callable[[], float] = monotonic
    unanswered: int | None = field(default=None, init=False)
    _probes: int = field(default=0, init=False)  # how often a topic was probed; see `_in_growing_parts`

    def send(self, batches: Sequence[ClaimedBatch], *, is_half: bool, shed_at: float) -> list[BatchSendResult]:
        """
        Send batches, either all ordered or all unordered; return their results, which contain each of their positions.

        Args:
            is_half: send half messages instead of messages.
            shed_at: the time of the clock when half of the lease is over; from then on, no further call is made.
        """
        results = {batch.id: BatchSendResult(batch, source=self.source) for batch in batches}
        is_probe = self.breakers.state is BreakerState.HALF_OPEN
        unavailable = {} if is_probe else {topic: self._why_open(topic) for topic in self.breakers.open_topics}
        stopped_by = self._send_all(batches, results, unavailable, is_half=is_half, shed_at=shed_at)
        for result in results.values():
            result.complete(unavailable.get(result.batch.topic, stopped_by))
        return list(results.values())

    def _send_all(
        self,
        batches: Sequence[ClaimedBatch],
        results: dict[int, BatchSendResult],
        unavailable: dict[str, Unaccepted],
        *,
        is_half: bool,
        shed_at: float,
    ) -> Unaccepted | None:
        """
        Make all calls to the broker; return why some were not made, or None.

        Args:
            unavailable: topic that got no answer -> reason. This method adds to it.
        """
        if self.breakers.state is BreakerState.OPEN:
            return self._why_open()
        has_begun = False
        for messages in self._calls(batches, results, unavailable):
            if has_begun and (stopped_by := self.why_shed(shed_at)):
                return stopped_by
            unavailable |= self._send_together(messages, results, is_half=is_half)
            has_begun = True
        return None

    def _calls(
        self, batches: Sequence[ClaimedBatch], results: dict[int, BatchSendResult], unavailable: Mapping[str, Unaccepted]
    ) -> Iterator[list[Loaded]]:
        """
        Yield the messages of each call to the broker; which messages these are depends on the results of the calls before.

        The messages of topics that are probed, and of batches that have failed before, are not sent together with others.
        """
        for messages in slices(self.connection, batches, self.breakers.budget):
            waves = in_order(messages, results) if batches[0].order_keys is not None else iter([messages])
            for wave in waves:
                together, alone = [], []
                for batch, rows in wave:
                    if self.breakers.is_probed(batch.topic):
                        alone.append((batch, self._in_growing_parts(rows)))
                    elif batch.failures:
                        alone.append((batch, _in_shrinking_parts(rows, batch.failures)))
                    else:
                        together.append((batch, rows))
                if together:
                    yield together
                for batch, parts in alone:
                    for rows in parts:
                        if batch.topic in unavailable:
                            break
                        yield [(batch, rows)]

    def _in_growing_parts(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """
        Yield the messages of a topic whose last send got no answer in growing parts: one as a probe, then two, four, and so on.

        Each call begins one message later than the last one, so that a message that the broker never answers is not always the
        probe.
        """
        start = self._probes % len(rows)
        self._probes += 1
        rows = [*rows[start:], *rows[:start]]
        size = 1
        while rows:
            yield rows[:size]
            rows, size = rows[size:], size * 2

    def why_shed(self, shed_at: float) -> Unaccepted | None:
        """Return why no further call is made: the relay stops, or half of the lease is over. None if another may be made."""
        if self.is_stopping():
            return Unaccepted(SplitReason.SHED, "The relay stopped before this message was sent.")
        if self.clock() >= shed_at:
            return Unaccepted(SplitReason.SHED, "Half of the lease was over before this message was sent.")
        return None

    def _send_together(
        self, wave: Sequence[Loaded], results: dict[int, BatchSendResult], *, is_half: bool
    ) -> dict[str, Unaccepted]:
        """Make one call to the broker; return the topics that got no answer, each with the reason."""
        messages: list[Outgoing] = []
        sent: list[tuple[ClaimedBatch, list[int]]] = []
        for batch, rows in wave:
            if positions := self.build(rows, results[batch.id], messages, is_half=is_half):
                sent.append((batch, positions))
        batches = [batch for batch, _ in sent]
        outcomes = iter(self._call(messages, batches, is_half=is_half) if messages else ())
        failures: dict[str, list[SendResult]] = {}
        answered: set[str] = set()
        for batch, positions in sent:
            failed = results[batch.id].record(positions, islice(outcomes, len(positions)))
            failures.setdefault(batch.topic, []).extend(failed)
            if len(failed) < len(positions) or any(result.status in ANSWERS for result in failed):
                answered.add(batch.topic)
        unavailable = self._update_breakers(failures, answered)
        self.unanswered = next((batch.id for batch in batches if batch.topic in unavailable), None)
        return unavailable

    def build(self, rows: Sequence[Row], result: BatchSendResult, messages: list[Outgoing], *, is_half: bool) -> list[int]:
        """Append the outgoing messages of a batch; return their positions. A row that cannot be sent is REFUSED."""
        builder = OutgoingBuilder(result.batch, source=self.source, is_half=is_half)
        positions = []
        for _, position, key, headers, about, body in rows:
            try:
                if headers is None:
                    raise ValueError(ROW_GONE)
                messages.append(builder.build(position, key, headers, about, body))
                positions.append(position)
            except (ValueError, msgspec.MsgspecError) as error:
                reason = str(error) if headers is None else f"Its row cannot be read: {error}"
                result.unaccepted[position] = _refuse(result.batch, position, reason)
        return positions

    def _call(self, messages: list[Outgoing], batches: Sequence[ClaimedBatch], *, is_half: bool) -> list[SendResult]:
        """Call the broker. After an error, or a wrong number of results, all messages are UNSURE."""
        try:
            with tracing.send(messages), self.timed(messages):
                outcomes = HalfMessages.of(self.broker).send_halves(messages) if is_half else self.broker.send(messages)
        except Exception as error:
            reason = f"Broker {self.broker.alias!r} raised {error_text(error)}"
            logger.exception("%s. Batches: %s.", reason, _batch_ids(batches), extra=self._log_fields(batches))
            return [SendResult(SendStatus.UNSURE, reason=reason)] * len(messages)
        if len(outcomes) != len(messages):
            reason = f"Broker {self.broker.alias!r} returned {len(outcomes)} results for {len(messages)} messages."
            logger.error("%s Batches: %s.", reason, _batch_ids(batches), extra=self._log_fields(batches))
            return [SendResult(SendStatus.UNSURE, reason=reason)] * len(messages)
        return outcomes

    @contextmanager
    def timed(self, messages: Sequence[Outgoing]) -> Iterator[None]:
        """Measure how long the block takes to send messages, and adapt the budget."""
        began = self.clock()
        try:
            yield
        finally:
            self.breakers.budget.adapt(sum(len(message.body) for message in messages), self.clock() - began)

    def _why_open(self, topic: str = "") -> Unaccepted:
        """Return why messages are not sent: the error that opened the breaker of their topic, or for "" that of the broker."""
        return Unaccepted(SplitReason.UNAVAILABLE, self.breakers.reason(topic))

    def _log_fields(self, batches: Sequence[ClaimedBatch]) -> dict[str, Any]:
        topics = (batch.topic for batch in batches)
        return log_fields(broker=self.broker.alias, batches=_batch_ids(batches), topics=topics)

    def _update_breakers(self, failures: Mapping[str, Sequence[SendResult]], answered: Collection[str]) -> dict[str, Unaccepted]:
        """
        Update the breakers; return the topics that got no answer, each with the reason.

        Args:
            failures: topic -> results that were not ACCEPTED, for each topic of the call.
            answered: topics that got an answer, even if it is an error.
        """
        unavailable = {}
        for topic, failed in failures.items():
            if topic in answered:
                self.breakers.record_answer(topic)
                continue
            reason = next((result.reason for result in failed if result.status is SendStatus.UNAVAILABLE), None)
            if reason is None:
                continue
            unavailable[topic] = Unaccepted(SplitReason.UNAVAILABLE, reason)
            if seconds := self.breakers.record_no_answer(topic, reason):
                logger.warning(
                    "Topic %r of broker %r gets no answer (%s). The relay skips the topic for %.1f s.",
                    topic,
                    self.broker.alias,
                    reason,
                    seconds,
                    extra=log_fields(topic=topic, broker=self.broker.alias),
                )
        return unavailable


def _in_shrinking_parts(rows: Sequence[Row], failures: int) -> Iterator[Sequence[Row]]:
    """Yield the messages of a failed batch in parts, which get smaller with each failure, to find the message that fails."""
    size = max(1, len(rows) >> min(SHIFT_PER_FAILURE * failures, MAX_SHIFT))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def in_order(messages: Sequence[Loaded], results: dict[int, BatchSendResult]) -> Iterator[list[Loaded]]:
    """
    Yield messages of ordered topics in waves: the first of each key, then the second of each, and so on.

    When a message is not accepted, later messages of its key are not sent either.
    """
    batches = [batch for batch, _ in messages]
    stopped_keys: set[OrderKey] = set()
    for result in results.values():
        stopped_keys |= {_key(result.batch, position) for position in result.unaccepted}
    waiting = [(_key(batch, row[1]), row) for batch, rows in messages for row in rows]
    while waiting:
        wave: dict[OrderKey, Row] = {}
        later = []
        for key, row in waiting:
            if key not in stopped_keys and wave.setdefault(key, row) is not row:
                later.append((key, row))
        if wave:
            yield list(by_batch(wave.values(), batches))
        stopped_keys |= {key for key, row in wave.items() if row[1] in results[row[0]].unaccepted}
        waiting = later


def _key(batch: ClaimedBatch, position: int) -> OrderKey:
    return batch.id, (batch.order_keys or ())[position - 1]


def _batch_ids(batches: Sequence[ClaimedBatch]) -> list[int]:
    return sorted({batch.id for batch in batches})


def _refuse(batch: ClaimedBatch, position: int, reason: str) -> Unaccepted:
    """Send an alert for a message whose row cannot be sent, and return its result."""
    details = {"batch": batch.id, "message": batch.message_ids[position - 1]}
    extra = log_fields(message_id=details["message"], topic=batch.topic, batch=batch.id, attempt=batch.attempt)
    logger.error("Message %(message)s of batch %(batch)s cannot be sent: %(reason)s", details | {"reason": reason}, extra=extra)
    signals.alert.send_robust(sender=Sender, reason=reason, details=details)
    return Unaccepted(SplitReason.REFUSED, reason)
