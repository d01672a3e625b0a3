"""
Hands messages to the broker and returns what became of each one.

One-phase and two-phase sends differ only in the call and the token. On ordered topics the next message of a key is sent
after the answer for the one before; after a failure no more of that key is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import msgspec

from outbox import signals, tracing
from outbox.batches.batch import Batch, BatchSendResult, SplitReason, Unaccepted
from outbox.brokers.base import Broker, Outgoing, SendResult, SendStatus
from outbox.brokers.capabilities import HalfMessages
from outbox.database import Connection
from outbox.logs import get_logger, log_fields
from outbox.relay.breaker import Breakers, BreakerState
from outbox.relay.cloudevents import seal
from outbox.relay.load import Loaded, slices

logger = get_logger(__name__)

ANSWERS = frozenset({SendStatus.ACCEPTED, SendStatus.REFUSED, SendStatus.MISCONFIGURED})

GONE = "Its message row is gone. Restore it from a backup or an archive, or skip the message."

A_MOMENT_AGO = Unaccepted(SplitReason.UNAVAILABLE, "There was no answer a moment ago.")

HELD = Unaccepted(SplitReason.HELD, "An earlier message of its key was not accepted.")


@dataclass(slots=True)
class Sender:
    """
    Sends batches to one broker.

    Args:
        source: the stable id of the database.
        slice_bytes: bodies loaded at once.
        is_stopping: says that what is not handed over yet shall be let go.
    """

    connection: Connection
    broker: Broker
    breakers: Breakers
    source: str
    slice_bytes: int
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
        halt = self._hand_over_all(batches, results, away, is_half=is_half, shed_at=shed_at)
        for one in results.values():
            if reason := away.get(one.batch.topic, halt):
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
            if has_begun and (halt := self._why_shed(shed_at)):
                return halt
            away |= self._hand_over(messages, results, is_half=is_half)
            has_begun = True
        return None

    def _calls(
        self, batches: Sequence[Batch], results: dict[int, BatchSendResult], away: Mapping[str, Unaccepted]
    ) -> Iterator[list[Loaded]]:
        """Return what may be handed over together, looking at how the calls before went."""
        for messages in slices(self.connection, batches, slice_bytes=self.slice_bytes):
            waves = in_order(messages, results) if batches[0].order_keys is not None else iter([messages])
            for wave in waves:
                if self.breakers.failed_topics:
                    yield from self._with_probes(wave, away)
                else:
                    yield wave

    def _with_probes(self, wave: Sequence[Loaded], away: Mapping[str, Unaccepted]) -> Iterator[list[Loaded]]:
        """Return the first message of each topic that is probed, and then what is left of the topics that are not away."""
        firsts = {loaded.batch.topic: loaded for loaded in reversed(wave) if loaded.batch.topic not in away}
        probes = [loaded for topic, loaded in firsts.items() if self.breakers.is_probed(topic)]
        if probes:
            yield probes
        if rest := [one for one in wave if one.batch.topic not in away and not any(one is probe for probe in probes)]:
            yield rest

    def _why_shed(self, shed_at: float) -> Unaccepted | None:
        if self.is_stopping():
            return Unaccepted(SplitReason.SHED, "The relay was told to stop.")
        if self.clock() >= shed_at:
            return Unaccepted(SplitReason.SHED, "The lease was half gone before its turn came.")
        return None

    def _hand_over(
        self, messages: Sequence[Loaded], results: dict[int, BatchSendResult], *, is_half: bool
    ) -> dict[str, Unaccepted]:
        """Make one call; return the topics of which none need be made any more, each with the reason."""
        sealed: list[Outgoing] = []
        places: list[Loaded] = []
        for loaded in messages:
            try:
                if loaded.row is None:
                    raise ValueError(GONE)
                sealed.append(seal(loaded.row, loaded.batch, loaded.position, source=self.source, is_half=is_half))
                places.append(loaded)
            except (ValueError, msgspec.MsgspecError) as error:
                results[loaded.batch.id].unaccepted[loaded.position] = _unreadable(loaded, error)
        outcomes = self._call(sealed, places, is_half=is_half) if sealed else []
        for loaded, outcome in zip(places, outcomes, strict=True):
            one = results[loaded.batch.id]
            if outcome.status is SendStatus.ACCEPTED:
                one.accepted[loaded.position] = outcome.half_id
                one.half_places[loaded.position] = outcome.place
            else:
                one.unaccepted[loaded.position] = Unaccepted(SplitReason(outcome.status), outcome.reason)
        return self._note(zip(places, outcomes, strict=True))

    def _call(self, messages: list[Outgoing], places: Sequence[Loaded], *, is_half: bool) -> list[SendResult]:
        """Call the broker; an error, or outcomes that do not fit the messages, leave all of them unsure."""
        try:
            with tracing.send(messages):
                outcomes = HalfMessages.of(self.broker).send_halves(messages) if is_half else self.broker.send(messages)
        except Exception as error:
            reason = f"Broker {self.broker.alias!r} raised {type(error).__name__}: {error}"
            logger.exception("%s. Batches: %s.", reason, _batch_ids(places), extra=self._fields(places))
            return [SendResult(SendStatus.UNSURE, reason=reason)] * len(messages)
        if len(outcomes) != len(messages):
            reason = f"Broker {self.broker.alias!r} gave {len(outcomes)} outcomes for {len(messages)} messages."
            logger.error("%s Batches: %s.", reason, _batch_ids(places), extra=self._fields(places))
            return [SendResult(SendStatus.UNSURE, reason=reason)] * len(messages)
        return outcomes

    def _fields(self, places: Sequence[Loaded]) -> dict[str, Any]:
        topics = (loaded.batch.topic for loaded in places)
        return log_fields(broker=self.broker.alias, batches=_batch_ids(places), topics=topics)

    def _note(self, outcomes: Iterable[tuple[Loaded, SendResult]]) -> dict[str, Unaccepted]:
        """Notify the breakers; return the topics that got no answer, with what the broker said: the rest of them need not try."""
        topics: dict[str, list[SendResult]] = {}
        for loaded, outcome in outcomes:
            topics.setdefault(loaded.batch.topic, []).append(outcome)
        away = {}
        for topic, results in topics.items():
            statuses = {result.status for result in results}
            if statuses & ANSWERS:
                self.breakers.note_answer(topic)
            if statuses & ANSWERS or SendStatus.UNAVAILABLE not in statuses:
                continue
            reason = next(one.reason for one in results if one.status is SendStatus.UNAVAILABLE)
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


def in_order(messages: Sequence[Loaded], results: dict[int, BatchSendResult]) -> Iterator[list[Loaded]]:
    """
    Return messages of ordered topics in waves: the first of each key, then the second of each, and so on.

    A key of which a message was not accepted is held: its later ones are not sent either.
    """
    held: set[tuple[int, int]] = set()
    for one in results.values():
        held |= {_key(one.batch, position) for position in one.unaccepted}
    waiting = list(messages)
    while waiting:
        wave: dict[tuple[int, int], Loaded] = {}
        later = []
        for loaded in waiting:
            key = _key(loaded.batch, loaded.position)
            if key in held:
                results[loaded.batch.id].unaccepted[loaded.position] = HELD
            elif wave.setdefault(key, loaded) is not loaded:
                later.append(loaded)
        if wave:
            yield list(wave.values())
        held |= {key for key, loaded in wave.items() if loaded.position in results[loaded.batch.id].unaccepted}
        waiting = later


def _key(batch: Batch, position: int) -> tuple[int, int]:
    assert batch.order_keys is not None
    return batch.id, batch.order_keys[position - 1]


def _batch_ids(places: Sequence[Loaded]) -> list[int]:
    return sorted({loaded.batch.id for loaded in places})


def _unreadable(loaded: Loaded, error: Exception) -> Unaccepted:
    """Report that a message can never go as its row stands, and alert."""
    reason = str(error) if loaded.row is None else f"Its row cannot be read: {error}"
    details = {"batch": loaded.batch.id, "message": loaded.batch.message_ids[loaded.position - 1]}
    extra = log_fields(
        message_id=details["message"], topic=loaded.batch.topic, batch=loaded.batch.id, attempt=loaded.batch.attempt
    )
    logger.error("Message %(message)s of batch %(batch)s cannot be sent.", details, extra=extra)
    signals.alarm.send_robust(sender=Sender, reason=reason, details=details)
    return Unaccepted(SplitReason.REFUSED, reason)
