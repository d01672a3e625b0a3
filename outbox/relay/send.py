"""
Hands messages to the broker and returns what became of each one.

One-phase and two-phase sends differ only in the call and the token. On ordered topics the next message of a key is sent
after the answer for the one before; after a failure no more of that key is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Any, TypeAlias

import msgspec

from outbox import signals, tracing
from outbox.batches.batch import Batch, BatchSendResult, SplitReason, Unaccepted
from outbox.brokers.base import Broker, Outgoing, SendResult, SendStatus
from outbox.brokers.capabilities import HalfMessages
from outbox.database import Connection
from outbox.logs import get_logger, log_fields
from outbox.relay.breaker import Breakers, BreakerState
from outbox.relay.cloudevents import Sealer
from outbox.relay.load import Loaded, Row, by_batch, slices

logger = get_logger(__name__)

SLICE_BYTES = 8 * 1024 * 1024  # bodies loaded at once

ANSWERS = (SendStatus.ACCEPTED, SendStatus.REFUSED, SendStatus.MISCONFIGURED)

OrderKey: TypeAlias = tuple[int, int]  # the id of a batch, and an order key of its topic; two topics may use one key

GONE = "Its message row is gone. Restore it from a backup or an archive, or skip the message."

A_MOMENT_AGO = Unaccepted(SplitReason.UNAVAILABLE, "There was no answer a moment ago.")

HELD = Unaccepted(SplitReason.HELD, "An earlier message of its key was not accepted.")


@dataclass(slots=True)
class Sender:
    """
    Sends batches to one broker.

    Args:
        source: the stable id of the database.
        is_stopping: says that what is not handed over yet shall be let go.
    """

    connection: Connection
    broker: Broker
    breakers: Breakers
    source: str
    is_stopping: Callable[[], bool]
    clock: Callable[[], float] = monotonic

    def send(self, batches: Sequence[Batch], *, is_half: bool, shed_at: float) -> list[BatchSendResult]:
        """
        Send batches, all ordered or none; return what the broker made of each position of each.

        Args:
            is_half: store half messages; else send whole ones.
            shed_at: by this time of the clock what is not handed over yet is let go, its lease being half gone.
        """
        results = {batch.id: BatchSendResult(batch, source=self.source) for batch in batches}
        is_probe = self.breakers.state is BreakerState.HALF_OPEN
        away = {} if is_probe else dict.fromkeys(self.breakers.open_topics, A_MOMENT_AGO)
        stopped_by = self._hand_over_all(batches, results, away, is_half=is_half, shed_at=shed_at)
        for one in results.values():
            if reason := away.get(one.batch.topic, stopped_by):
                for position in one.batch.positions:
                    if position not in one.accepted:
                        one.unaccepted.setdefault(position, reason)
        return list(results.values())

    def _hand_over_all(
        self,
        batches: Sequence[Batch],
        results: dict[int, BatchSendResult],
        away: dict[str, Unaccepted],
        *,
        is_half: bool,
        shed_at: float,
    ) -> Unaccepted | None:
        """Make one call after the other; return the reason why not all were made. `away` gets the topics without answer."""
        if self.breakers.state is BreakerState.OPEN:
            return A_MOMENT_AGO
        has_begun = False
        for messages in self._calls(batches, results, away):
            if has_begun and (stopped_by := self._why_shed(shed_at)):
                return stopped_by
            away |= self._hand_over(messages, results, is_half=is_half)
            has_begun = True
        return None

    def _calls(
        self, batches: Sequence[Batch], results: dict[int, BatchSendResult], away: Mapping[str, Unaccepted]
    ) -> Iterator[list[Loaded]]:
        """Return what may be handed over together, looking at how the calls before went."""
        for messages in slices(self.connection, batches, slice_bytes=SLICE_BYTES):
            waves = in_order(messages, results) if batches[0].order_keys is not None else iter([messages])
            for wave in waves:
                if self.breakers.failed_topics:
                    yield from self._with_probes(wave, away)
                else:
                    yield wave

    def _with_probes(self, wave: Sequence[Loaded], away: Mapping[str, Unaccepted]) -> Iterator[list[Loaded]]:
        """Return the first message of each topic that is probed, and then what is left of the topics that are not away."""
        firsts = {part.batch.topic: part for part in reversed(wave) if part.batch.topic not in away}
        probed = [part for topic, part in firsts.items() if self.breakers.is_probed(topic)]
        if probed:
            yield [Loaded(part.batch, part.rows[:1]) for part in probed]
        rest = [
            Loaded(part.batch, part.rows[1:]) if any(part is one for one in probed) else part
            for part in wave
            if part.batch.topic not in away
        ]
        if rest := [part for part in rest if part.rows]:
            yield rest

    def _why_shed(self, shed_at: float) -> Unaccepted | None:
        if self.is_stopping():
            return Unaccepted(SplitReason.SHED, "The relay was told to stop.")
        if self.clock() >= shed_at:
            return Unaccepted(SplitReason.SHED, "The lease was half gone before its turn came.")
        return None

    def _hand_over(self, parts: Sequence[Loaded], results: dict[int, BatchSendResult], *, is_half: bool) -> dict[str, Unaccepted]:
        """Make one call; return the topics of which none need be made any more, each with the reason."""
        messages: list[Outgoing] = []
        places: list[tuple[Batch, list[int]]] = []
        for part in parts:
            positions = self._seal(part, results[part.batch.id], messages, is_half=is_half)
            if positions:
                places.append((part.batch, positions))
        batches = [batch for batch, _ in places]
        outcomes = iter(self._call(messages, batches, is_half=is_half) if messages else ())
        failures: dict[str, list[SendResult]] = {}
        answered: set[str] = set()
        for batch, positions in places:
            failed = results[batch.id].note(positions, islice(outcomes, len(positions)))
            failures.setdefault(batch.topic, []).extend(failed)
            if len(failed) < len(positions) or any(one.status in ANSWERS for one in failed):
                answered.add(batch.topic)
        return self._note(failures, answered)

    def _seal(self, part: Loaded, result: BatchSendResult, messages: list[Outgoing], *, is_half: bool) -> list[int]:
        """Add what travels of a batch to the messages; return the positions, without those that can never go."""
        sealer = Sealer(part.batch, source=self.source, is_half=is_half)
        positions = []
        for _, position, key, headers, about, body in part.rows:
            try:
                if headers is None:
                    raise ValueError(GONE)
                messages.append(sealer.seal(position, key, headers, about, body))
                positions.append(position)
            except (ValueError, msgspec.MsgspecError) as error:
                reason = str(error) if headers is None else f"Its row cannot be read: {error}"
                result.unaccepted[position] = _never(part.batch, position, reason)
        return positions

    def _call(self, messages: list[Outgoing], batches: Sequence[Batch], *, is_half: bool) -> list[SendResult]:
        """Call the broker; an error, or outcomes that do not fit the messages, leave all of them unsure."""
        try:
            with tracing.send(messages):
                outcomes = HalfMessages.of(self.broker).send_halves(messages) if is_half else self.broker.send(messages)
        except Exception as error:
            reason = f"Broker {self.broker.alias!r} raised {type(error).__name__}: {error}"
            logger.exception("%s. Batches: %s.", reason, _batch_ids(batches), extra=self._fields(batches))
            return [SendResult(SendStatus.UNSURE, reason=reason)] * len(messages)
        if len(outcomes) != len(messages):
            reason = f"Broker {self.broker.alias!r} gave {len(outcomes)} outcomes for {len(messages)} messages."
            logger.error("%s Batches: %s.", reason, _batch_ids(batches), extra=self._fields(batches))
            return [SendResult(SendStatus.UNSURE, reason=reason)] * len(messages)
        return outcomes

    def _fields(self, batches: Sequence[Batch]) -> dict[str, Any]:
        topics = (batch.topic for batch in batches)
        return log_fields(broker=self.broker.alias, batches=_batch_ids(batches), topics=topics)

    def _note(self, failures: Mapping[str, Sequence[SendResult]], answered: Collection[str]) -> dict[str, Unaccepted]:
        """
        Notify the breakers; return the topics that got no answer, with what the broker said: the rest of them need not try.

        Args:
            failures: topic -> outcomes that were not ACCEPTED, for each topic of the call.
            answered: topics that got an answer, whatever it said.
        """
        away = {}
        for topic, failed in failures.items():
            if topic in answered:
                self.breakers.note_answer(topic)
                continue
            reason = next((one.reason for one in failed if one.status is SendStatus.UNAVAILABLE), None)
            if reason is None:
                continue
            away[topic] = Unaccepted(SplitReason.UNAVAILABLE, reason)
            if seconds := self.breakers.note_unavailable(topic):
                logger.warning(
                    "Topic %r of broker %r gets no answer (%s). It is left alone for %.1f s.",
                    topic,
                    self.broker.alias,
                    reason,
                    seconds,
                    extra=log_fields(topic=topic, broker=self.broker.alias),
                )
        return away


def in_order(parts: Sequence[Loaded], results: dict[int, BatchSendResult]) -> Iterator[list[Loaded]]:
    """
    Return messages of ordered topics in waves: the first of each key, then the second of each, and so on.

    A key of which a message was not accepted is held: its later ones are not sent either.
    """
    batches = {part.batch.id: part.batch for part in parts}
    held: set[OrderKey] = set()
    for one in results.values():
        held |= {_key(one.batch, position) for position in one.unaccepted}
    waiting = [(_key(part.batch, row[1]), row) for part in parts for row in part.rows]
    while waiting:
        wave: dict[OrderKey, Row] = {}
        later = []
        for key, row in waiting:
            if key in held:
                results[row[0]].unaccepted[row[1]] = HELD
            elif wave.setdefault(key, row) is not row:
                later.append((key, row))
        if wave:
            yield list(by_batch(wave.values(), batches.values()))
        held |= {key for key, row in wave.items() if row[1] in results[row[0]].unaccepted}
        waiting = later


def _key(batch: Batch, position: int) -> OrderKey:
    assert batch.order_keys is not None
    return batch.id, batch.order_keys[position - 1]


def _batch_ids(batches: Sequence[Batch]) -> list[int]:
    return sorted({batch.id for batch in batches})


def _never(batch: Batch, position: int, reason: str) -> Unaccepted:
    """Report that a message can never go as its row stands, and alert."""
    details = {"batch": batch.id, "message": batch.message_ids[position - 1]}
    extra = log_fields(message_id=details["message"], topic=batch.topic, batch=batch.id, attempt=batch.attempt)
    logger.error("Message %(message)s of batch %(batch)s cannot be sent.", details, extra=extra)
    signals.alert.send_robust(sender=Sender, reason=reason, details=details)
    return Unaccepted(SplitReason.REFUSED, reason)
