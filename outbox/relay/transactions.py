"""
Send batches to a broker with transactional sends: exactly one copy of each message becomes visible.

THE TRANSACTION holds the messages of all batches of a round, and a marker that names these batches with their attempts. Each
lane has a marker, which each transaction overwrites. So a batch that was sent is marked SENT before the next transaction begins.

WITHOUT AN ANSWER to the commit, only the marker says whether there was one, and only after the lane was fenced: until then the
transaction may still be committed. The relay opens the lane again, which fences it, and settles the lane: batches that the marker
names are SENT, the others are released.

A BATCH OF ANOTHER LANE that is claimed again may be in doubt, too. That lane is fenced first, and its marker read; only then is
the batch part of a transaction of this lane. The claim comes before the fence: otherwise the holder of that lane could open it
again, and send the batch, in between.

A LOST MARKER is no answer. Batches in doubt are DEAD then, and an operator decides; nothing else is sent before.

The statements are in `batches/transactions.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec
from msgspec.structs import replace

from outbox import signals, tracing
from outbox.batches.batch import BatchSendResult, ClaimedBatch, SplitReason, Unaccepted
from outbox.batches.split import split_at_claim
from outbox.batches.steps import DeadNotice, notify_dead
from outbox.batches.transactions import (
    adopt,
    give_up_batch,
    give_up_lane,
    is_in_doubt,
    mark_committed,
    read_named,
    settle_lane,
    withdraw,
)
from outbox.brokers.base import Broker, Outgoing
from outbox.brokers.capabilities import TransactionalSends
from outbox.database import Connection
from outbox.database.identity import read_server
from outbox.errors import BrokerMisconfigured, BrokerUnavailable, FenceLost
from outbox.failpoints import failpoint
from outbox.logs import get_logger, log_fields
from outbox.relay.commit import Committer
from outbox.relay.lane import holding_lane
from outbox.relay.send import Loaded, Row, Sender, slices
from outbox.relay.splitter import Splitter

logger = get_logger(__name__)

MARKER_LOST = (
    "The marker of lane {lane} is gone from broker {broker!r}, so nobody can tell whether this message was published. "
    "Replay sends it, perhaps a second time; discard accepts it as published."
)
OTHER_REJECTED = Unaccepted(SplitReason.SHED, "Another message of its transaction was rejected. It is sent again.")
NEXT_ROUND = Unaccepted(SplitReason.SHED, "The transaction was full. It is sent in the next one.")
LANE_CLOSED = Unaccepted(SplitReason.SHED, "The transaction before did not end cleanly. It is sent again.")


class Marker(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    The marker of a transaction, as JSON.

    Args:
        sent: its batches: id and attempt.
        database: the database server and the database that sent it. "": unknown.
        timeline: the server's timeline, which grows with each failover and each restore. 0: unknown.
    """

    sent: tuple[tuple[int, int], ...] = ()
    database: str = ""
    timeline: int = 0


@dataclass(slots=True)
class TransactionalSender:
    """
    Opens the lane of one relay at its broker, settles it, and sends claimed batches in its transactions.

    Args:
        source: the stable id of the database.
        takes_over: whether lanes whose markers another database wrote are taken over, instead of refused.
        lanes: how many there are.
        is_settled: whether each transaction of the lane was recorded here.
    """

    connection: Connection
    broker: Broker
    lane: int
    source: str
    sender: Sender
    splitter: Splitter
    committer: Committer
    why_shed: Callable[[], Unaccepted | None]
    takes_over: bool = False
    lanes: int = 0
    is_settled: bool = field(default=False, init=False)
    _database: str = field(default="", init=False)  # as `read_server` has it, and its timeline
    _timeline: int = field(default=0, init=False)

    @property
    def _sends(self) -> TransactionalSends:
        return TransactionalSends.of(self.broker)

    def open_lane(self) -> None:
        """
        Open the lane at the broker and settle it, unless it is open; call it before a claim.

        Raises:
            BrokerUnavailable: it cannot be opened now.
            LaneBlocked: another lane perhaps can.
            BrokerMisconfigured: it cannot be opened until somebody acts.
        """
        if self.is_settled and self._sends.is_lane_open(self.lane):
            return
        self._open()
        if self.takes_over:
            self._take_others_over()

    def _open(self) -> None:
        self.is_settled = False
        marker = self._read(self._sends.open_lane(self.source, self.lane), self.lane)
        failpoint("relay.after_open")
        self._database, self._timeline = read_server(self.connection)
        if marker is None:
            self._give_up_lane()
            self._reset_marker()
        else:
            is_foreign = self._is_foreign(marker)
            if is_foreign and not self.takes_over:
                raise self._refused(marker)
            self._settle(marker, is_foreign=is_foreign)
        self.is_settled = True

    def _take_others_over(self) -> None:
        """Take over the other lanes in which another database has sent, too, so that no relay is refused later."""
        held = []
        for number in range(1, self.lanes + 1):
            marker = self._read(self._sends.look_at_lane(self.source, number), number)
            if marker is not None and self._is_foreign(marker):
                with holding_lane(self.connection, number) as is_held:
                    if is_held:
                        dataclasses.replace(self, lane=number)._open()
                    else:
                        held.append(number)
        if held:
            text = (
                "Lanes %s were not taken over, since other relays hold them. Stop them, and run outbox_relay --take-over again."
            )
            logger.warning(text, held, extra=log_fields(broker=self.broker.alias))

    def _settle(self, marker: Marker, *, is_foreign: bool) -> None:
        """Decide what the lane's transactions have left in doubt, by its marker."""
        lane = self.lane
        settled = settle_lane(self.connection, lane, self.broker.alias, marker.sent)
        failpoint("relay.after_settle")
        if settled:
            extra = log_fields(broker=self.broker.alias, lane=lane, batches=sorted(settled))
            logger.info("Lane %s: batches %s were published, though not marked.", lane, sorted(settled), extra=extra)
        unknown, ahead = read_named(self.connection, lane, marker.sent)
        is_older = ahead > 0 or 0 < marker.timeline < self._timeline
        if is_older:
            self._alert_restored(marker, ahead)
        if unknown or is_older or is_foreign:  # a batch that gets the same id again must not be taken for one that was sent
            self._reset_marker()

    def _is_foreign(self, marker: Marker) -> bool:
        """Return whether another database has sent the last transaction of a lane."""
        return bool(self._database) and marker.database not in ("", self._database)

    def _refused(self, marker: Marker) -> BrokerMisconfigured:
        return BrokerMisconfigured(
            f"Another database (server/id {marker.database}) has sent in lane {self.lane} of broker "
            f"{self.broker.alias!r} under the same source id, {self.source}; this one is {self._database}.",
            hint="If this database is a copy, give it an id of its own: UPDATE outbox_source SET id = 'urn:uuid:' || "
            "gen_random_uuid(). If it replaces the other one, which is gone, run outbox_relay --take-over once, which takes all "
            "lanes.",
        )

    def _alert_restored(self, marker: Marker, ahead: int) -> None:
        details = {"lane": self.lane, "broker": self.broker.alias, "timeline": self._timeline, "batches": ahead}
        reason = (
            f"The database is on timeline {self._timeline}, and sent its last transaction on timeline {marker.timeline}; "
            f"it lacks {ahead} batches of it. It failed over or was restored: what it has lost since then may be sent again, "
            "and what was written then and is missing here is published all the same."
        )
        logger.error("Lane %s: %s", self.lane, reason, extra=log_fields(broker=self.broker.alias))
        signals.alert.send_robust(sender=TransactionalSender, reason=reason, details=details)

    def _give_up_lane(self) -> None:
        """Mark what the lane has left in doubt DEAD: its marker is gone, or there never was one."""
        lane, alias = self.lane, self.broker.alias
        if not is_in_doubt(self.connection, lane, alias):
            return
        self._notify_lost(lane, give_up_lane(self.connection, lane, alias, error=MARKER_LOST.format(lane=lane, broker=alias)))

    def _notify_lost(self, lane: int, dead: Sequence[DeadNotice]) -> None:
        notify_dead(dead)
        reason = f"The marker of lane {lane} is gone from broker {self.broker.alias!r}: {len(dead)} messages are dead."
        details = {"lane": lane, "broker": self.broker.alias, "messages": [message_id for message_id, _, _ in dead]}
        signals.alert.send_robust(sender=TransactionalSender, reason=reason, details=details)

    def _reset_marker(self) -> None:
        """Send a marker that names no batch."""
        lane = self.lane
        self._sends.send_transaction(lane, [], self._marker([]))
        if not self._sends.is_lane_open(lane):
            raise BrokerUnavailable(f"Broker {self.broker.alias!r} has not confirmed the first transaction of lane {lane}.")

    def relay(self, batches: Sequence[ClaimedBatch]) -> tuple[list[BatchSendResult], set[int]]:
        """
        Send claimed batches in as few transactions as their size allows, and mark them SENT.

        Returns:
            The result of each batch that was sent, or rejected; the ids of those that are SENT now.
        """
        results: list[BatchSendResult] = []
        sent: set[int] = set()
        waiting = self._adopt(self._release_unavailable(batches), sent)
        for loaded in self._loads(waiting):
            round_ = [BatchSendResult(batch, source=self.source) for batch, _ in loaded]
            stopped_by = LANE_CLOSED if not self.is_settled else self.why_shed() if results else None
            if stopped_by is None:
                self._relay_together(loaded, round_, sent)
            else:
                self._undo(round_, stopped_by)
            results += round_
        return results, sent

    def _release_unavailable(self, batches: Sequence[ClaimedBatch]) -> list[ClaimedBatch]:
        """Return the batches whose topics can take messages now; the others are released."""
        away = self._sends.find_away({batch.topic for batch in batches})
        for batch in batches:
            if batch.topic in away:
                self._return_unavailable(batch, away[batch.topic])
        return [batch for batch in batches if batch.topic not in away]

    def _adopt(self, batches: Sequence[ClaimedBatch], sent: set[int]) -> list[ClaimedBatch]:
        """
        Return the batches that may be sent in this lane's next transaction, which is recorded.

        Args:
            sent: the ids of those that were found to be published are added.
        """
        return [ready for batch in batches if (ready := self._adopt_one(batch, sent)) is not None]

    def _adopt_one(self, batch: ClaimedBatch, sent: set[int]) -> ClaimedBatch | None:
        lane, held = self.lane, batch.transaction
        if held is not None and held.attempt == batch.attempt:
            return batch  # no transaction before this claim may hold it
        try:
            if held is not None:
                failpoint("relay.before_fence")
                marker = self._read(self._sends.open_lane(self.source, held.lane), held.lane)
                failpoint("relay.after_fence")
                if marker is None:
                    error = MARKER_LOST.format(lane=held.lane, broker=self.broker.alias)
                    self._notify_lost(held.lane, give_up_batch(self.connection, batch, error=error))
                    return None
                if (batch.id, held.attempt) in marker.sent:
                    sent |= mark_committed(self.connection, held.lane, [(batch.id, held.attempt)])
                    return None
            adopted = adopt(self.connection, batch, lane)
            failpoint("relay.after_adopt")
            return adopted
        except FenceLost:
            return None
        except BrokerUnavailable as error:
            self._return_unavailable(batch, str(error))
            return None

    def _loads(self, batches: Sequence[ClaimedBatch]) -> Iterator[list[Loaded]]:
        """Yield what one transaction takes, by its budget: whole batches, and the first part of one whose rest is split off."""
        waiting = list(batches)
        while waiting and (loaded := next(slices(self.connection, waiting, self.sender.breakers.budget), None)):
            batch, rows = loaded.pop()
            waiting = waiting[waiting.index(batch) + 1 :]
            yield [*loaded, *self._cut(batch, rows)]

    def _cut(self, batch: ClaimedBatch, rows: Sequence[Row]) -> list[Loaded]:
        """Split the messages off a claimed batch that were not loaded, and return it; return nothing where the fence was lost."""
        rest = {position: NEXT_ROUND for position in batch.positions if position > rows[-1][1]}
        if not rest:
            return [(batch, rows)]
        try:
            self.splitter.split(batch, rest, split_at_claim)
        except FenceLost:
            return []
        return [(replace(batch, split=batch.split | rest.keys()), rows)]

    def _relay_together(self, loaded: Sequence[Loaded], results: Sequence[BatchSendResult], sent: set[int]) -> None:
        """Send batches in one transaction, and record what became of it."""
        messages: list[Outgoing] = []
        positions = [
            self.sender.build(rows, result, messages, is_half=False) for (_, rows), result in zip(loaded, results, strict=True)
        ]
        if any(result.unaccepted for result in results):
            self._undo(results, OTHER_REJECTED)
            return
        named = [(batch.id, batch.attempt) for batch, _ in loaded]
        self.is_settled = False
        failpoint("relay.before_transaction")
        with tracing.send(messages), self.sender.timed(messages):
            outcomes = iter(self._sends.send_transaction(self.lane, messages, self._marker(named)))
        failpoint("relay.after_transaction")
        for result, places in zip(results, positions, strict=True):
            result.note(places, islice(outcomes, len(places)))
        reasons = {unaccepted.reason for result in results for unaccepted in result.unaccepted.values()}
        if SplitReason.UNSURE in reasons:
            self._note_unsure(results)
        elif reasons:
            for result in results if reasons != {SplitReason.UNAVAILABLE} else ():  # the others were not tried alone
                for position in [
                    p for p, unaccepted in result.unaccepted.items() if unaccepted.reason is SplitReason.UNAVAILABLE
                ]:
                    del result.unaccepted[position]
            self._undo(results, OTHER_REJECTED)
        else:
            self._mark(loaded, named, sent)
            self.is_settled = True

    def _mark(self, loaded: Sequence[Loaded], named: Sequence[tuple[int, int]], sent: set[int]) -> None:
        mark_committed(self.connection, self.lane, named)
        sent |= {batch_id for batch_id, _ in named}  # where another relay has marked it first, too
        failpoint("relay.after_mark")
        for batch, rows in loaded:
            self.sender.breakers.note_answer(batch.topic)
            ids = [batch.message_ids[position - 1] for _, position, *_ in rows]
            tracing.note_sent(self.broker.alias, batch.topic, ids)

    def _undo(self, results: Sequence[BatchSendResult], rest: Unaccepted) -> None:
        """
        Return batches that are certainly not published.

        Args:
            rest: the reason of the messages that have none of their own.
        """
        withdraw(self.connection, self.lane, [result.batch for result in results])
        for result in results:
            result.accepted.clear()
            result.complete(rest)
            self._note(result)
            self._return(result.batch, result.unaccepted)

    def _note_unsure(self, results: Sequence[BatchSendResult]) -> None:
        """Log a transaction without an answer: its batches stay claimed until the lane is settled."""
        reason = next(unaccepted.text for result in results for unaccepted in result.unaccepted.values())
        batches = sorted(result.batch.id for result in results)
        extra = log_fields(broker=self.broker.alias, lane=self.lane, batches=batches)
        logger.warning("The transaction of lane %s got no answer; its marker decides. %s", self.lane, reason, extra=extra)

    def _note(self, result: BatchSendResult) -> None:
        """Update the breakers after a transaction that failed."""
        breakers, topic = self.sender.breakers, result.batch.topic
        texts = [unaccepted.text for unaccepted in result.unaccepted.values() if unaccepted.reason is SplitReason.UNAVAILABLE]
        if texts:
            breakers.note_unavailable(topic, texts[0])
        elif any(unaccepted.reason is not SplitReason.SHED for unaccepted in result.unaccepted.values()):
            breakers.note_answer(topic)

    def _return_unavailable(self, batch: ClaimedBatch, reason: str) -> None:
        self._return(batch, dict.fromkeys(batch.positions, Unaccepted(SplitReason.UNAVAILABLE, reason)))
        self.sender.breakers.note_unavailable(batch.topic, reason)

    def _return(self, batch: ClaimedBatch, unaccepted: dict[int, Unaccepted]) -> None:
        self.committer.return_unaccepted(BatchSendResult(batch, unaccepted=unaccepted, source=self.source))

    def _marker(self, named: Sequence[tuple[int, int]]) -> str:
        return msgspec.json.encode(Marker(tuple(named), self._database, self._timeline)).decode()

    def _read(self, text: str | None, lane: int) -> Marker | None:
        return _decode(text, lane, self.broker.alias)


def find_lanes_ahead(connection: Connection, broker: TransactionalSends, source: str, lanes: int) -> dict[int, int]:
    """
    Return lanes that have sent what the database does not have: lane -> number of batches. Nothing is changed.

    So the database was restored, or failed over and lost commits. Raises BrokerUnavailable or BrokerMisconfigured.
    """
    lanes_ahead = {}
    for lane in range(1, lanes + 1):
        marker = _decode(broker.look_at_lane(source, lane), lane, broker.alias)
        if marker is not None and (ahead := read_named(connection, lane, marker.sent)[1]):
            lanes_ahead[lane] = ahead
    return lanes_ahead


def _decode(text: str | None, lane: int, broker: str) -> Marker | None:
    """Return a marker that a broker has read. Raises BrokerMisconfigured if it is not one of this package."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Marker)
    except msgspec.MsgspecError as error:
        raise BrokerMisconfigured(
            f"The marker of lane {lane} of broker {broker!r} cannot be read: {error}",
            hint="Only relays of this package write to the marker topic. Find who else does.",
        ) from error
