"""
Send batches to a broker with transactional sends: exactly one copy of each message becomes visible.

A lane is a number that one relay holds alone; each lane has a transactional id at the broker. To open a lane is to begin a new
session with that id, which fences the lane: a transaction of an earlier session can no longer be committed.

THE TRANSACTION holds the messages of all batches of a round, and a marker that names these batches with their attempts. Each
lane has one marker, which each of its transactions overwrites. So batches that were sent have to be marked SENT before the next
transaction of the lane begins.

WITHOUT AN ANSWER to the commit, the batches are in doubt: only the marker shows whether the transaction was committed, and only
after the lane was fenced, since until then the transaction may still be committed. So the relay opens the lane again, and settles
it: batches that the marker names are marked SENT, the others are released.

A BATCH OF ANOTHER LANE that is claimed again may be in doubt, too. That lane is fenced first, and its marker is read. Only then
may the batch be sent in a transaction of this lane. The batch is claimed before that lane is fenced. Otherwise the holder of that
lane could, in between, open it again and send the batch.

A LOST MARKER proves nothing. Then the batches in doubt become DEAD, for an operator to decide, before anything else is sent.

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
OTHER_REJECTED = Unaccepted(SplitReason.SHED, "Another message of its transaction was rejected. The message is sent again.")
NEXT_ROUND = Unaccepted(SplitReason.SHED, "The transaction was full. The message is sent in the next one.")
LANE_CLOSED = Unaccepted(SplitReason.SHED, "The previous transaction of the lane may not have ended. The message is sent again.")


class Marker(msgspec.Struct, frozen=True, omit_defaults=True):
    """
    The marker of a transaction, as JSON.

    Args:
        sent: the id and attempt of each batch in the transaction.
        database: identifies the database server and the database of the relay, as in `read_server`; "" if unknown.
        timeline: the server's timeline, which grows with each failover and each restore; 0 if unknown.
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
        why_shed: returns why no further transaction is begun in this round; None if one may begin.
        takes_over: take over lanes whose markers another database wrote. By default, such a lane raises an error.
        lanes: the number of lanes.
        is_settled: whether this database has recorded what became of each transaction of the lane.
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
    _database: str = field(default="", init=False)  # this database and its timeline, from `read_server`
    _timeline: int = field(default=0, init=False)

    @property
    def _transactional_broker(self) -> TransactionalSends:
        return TransactionalSends.of(self.broker)

    def open_lane(self) -> None:
        """
        Open the lane at the broker and settle it, unless it is open and settled. Call this before a claim.

        Raises:
            BrokerUnavailable: the lane cannot be opened now.
            LaneBlocked: this lane cannot be opened now, but others perhaps can.
            BrokerMisconfigured: the lane cannot be opened until an operator acts.
        """
        if self.is_settled and self._transactional_broker.is_lane_open(self.lane):
            return
        self._open()
        if self.takes_over:
            self._take_others_over()

    def _open(self) -> None:
        """Open the lane, and settle its batches by its marker. If the marker is lost, mark those in doubt DEAD."""
        self.is_settled = False
        marker = self._decode_marker(self._transactional_broker.open_lane(self.source, self.lane), self.lane)
        failpoint("relay.after_open")
        self._database, self._timeline = read_server(self.connection)
        if marker is None:
            self._give_up_lane()
            self._reset_marker()
        else:
            is_foreign = self._is_foreign(marker)
            if is_foreign and not self.takes_over:
                raise self._foreign_error(marker)
            self._settle(marker, is_foreign=is_foreign)
        self.is_settled = True

    def _take_others_over(self) -> None:
        """Also take over the other lanes whose markers another database wrote, so that relays can open them later."""
        held_by_others = []
        for number in range(1, self.lanes + 1):
            marker = self._decode_marker(self._transactional_broker.read_lane_marker(self.source, number), number)
            if marker is not None and self._is_foreign(marker):
                with holding_lane(self.connection, number) as is_held:
                    if is_held:
                        dataclasses.replace(self, lane=number)._open()
                    else:
                        held_by_others.append(number)
        if held_by_others:
            text = (
                "Lanes %s were not taken over, since other relays hold them. Stop these relays, and run outbox_relay --take-over "
                "again."
            )
            logger.warning(text, held_by_others, extra=log_fields(broker=self.broker.alias))

    def _settle(self, marker: Marker, *, is_foreign: bool) -> None:
        """
        Settle the batches that the lane's transactions have left in doubt.

        Reset the marker if it names batches that are not recorded as sent, or comes from another database or an older timeline.
        """
        lane = self.lane
        settled = settle_lane(self.connection, lane, self.broker.alias, marker.sent)
        failpoint("relay.after_settle")
        if settled:
            extra = log_fields(broker=self.broker.alias, lane=lane, batches=sorted(settled))
            logger.info("Lane %s: batches %s had been published, and are marked SENT now.", lane, sorted(settled), extra=extra)
        unknown, ahead = read_named(self.connection, lane, marker.sent)
        was_restored = ahead > 0 or 0 < marker.timeline < self._timeline
        if was_restored:
            self._alert_restored(marker, ahead)
        if unknown or was_restored or is_foreign:  # so that new batches with the same ids are not taken for sent ones
            self._reset_marker()

    def _is_foreign(self, marker: Marker) -> bool:
        """Return whether another database has sent the last transaction of a lane."""
        return bool(self._database) and marker.database not in ("", self._database)

    def _foreign_error(self, marker: Marker) -> BrokerMisconfigured:
        return BrokerMisconfigured(
            f"Another database (server/id {marker.database}) has sent messages in lane {self.lane} of broker "
            f"{self.broker.alias!r} with the same source id, {self.source}; this database is {self._database}.",
            hint="If this database is a copy, give it another source id: UPDATE outbox_source SET id = 'urn:uuid:' || "
            "gen_random_uuid(). If it replaces the other database, which is no longer used, run outbox_relay --take-over once, "
            "which takes over all lanes.",
        )

    def _alert_restored(self, marker: Marker, ahead: int) -> None:
        details = {"lane": self.lane, "broker": self.broker.alias, "timeline": self._timeline, "batches": ahead}
        reason = (
            f"The database is on timeline {self._timeline}. The last transaction of the lane was sent on timeline "
            f"{marker.timeline}, and has {ahead} batches that the database lacks. So the database failed over or was restored, "
            "and has lost its last changes. Messages that it no longer knows to be sent may be sent again; messages that it has "
            "lost were published all the same."
        )
        logger.error("Lane %s: %s", self.lane, reason, extra=log_fields(broker=self.broker.alias))
        signals.alert.send_robust(sender=TransactionalSender, reason=reason, details=details)

    def _give_up_lane(self) -> None:
        """Mark the lane's batches in doubt DEAD, since its marker is lost. A lane that never had a marker has none in doubt."""
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
        """Overwrite the lane's marker with one that names no batch."""
        lane = self.lane
        self._transactional_broker.send_transaction(lane, [], self._marker([]))
        if not self._transactional_broker.is_lane_open(lane):
            raise BrokerUnavailable(f"Broker {self.broker.alias!r} has not confirmed the first transaction of lane {lane}.")

    def relay(self, batches: Sequence[ClaimedBatch]) -> tuple[list[BatchSendResult], set[int]]:
        """
        Send claimed batches in as few transactions as their size allows, and mark them SENT.

        Returns:
            The results of the batches that were sent, rejected or not reached; and the ids of the batches that are SENT now.
        """
        results: list[BatchSendResult] = []
        sent: set[int] = set()
        adopted = (self._adopt(batch, sent) for batch in self._release_unavailable(batches))
        waiting = [batch for batch in adopted if batch is not None]
        for loaded in self._load_transactions(waiting):
            new_results = [BatchSendResult(batch, source=self.source) for batch, _ in loaded]
            stopped_by = LANE_CLOSED if not self.is_settled else self.why_shed() if results else None
            if stopped_by is None:
                self._relay_together(loaded, new_results, sent)
            else:
                self._undo(new_results, stopped_by)
            results += new_results
        return results, sent

    def _release_unavailable(self, batches: Sequence[ClaimedBatch]) -> list[ClaimedBatch]:
        """Release the batches whose topics cannot take messages now; return the others."""
        unavailable = self._transactional_broker.find_unavailable({batch.topic for batch in batches})
        for batch in batches:
            if batch.topic in unavailable:
                self._return_unavailable(batch, unavailable[batch.topic])
        return [batch for batch in batches if batch.topic not in unavailable]

    def _adopt(self, batch: ClaimedBatch, sent: set[int]) -> ClaimedBatch | None:
        """
        Record that a batch may be in this lane's next transaction; return the batch, or None if it must not be sent now.

        Args:
            sent: a set to which the id of the batch is added if the batch turns out to be published already.
        """
        lane, recorded = self.lane, batch.transaction
        if recorded is not None and recorded.attempt == batch.attempt:
            return batch  # its claim has recorded this transaction, and no earlier one can hold the batch
        try:
            if recorded is not None:
                failpoint("relay.before_fence")
                marker = self._decode_marker(self._transactional_broker.open_lane(self.source, recorded.lane), recorded.lane)
                failpoint("relay.after_fence")
                if marker is None:
                    error = MARKER_LOST.format(lane=recorded.lane, broker=self.broker.alias)
                    self._notify_lost(recorded.lane, give_up_batch(self.connection, batch, error=error))
                    return None
                if (batch.id, recorded.attempt) in marker.sent:
                    sent |= mark_committed(self.connection, recorded.lane, [(batch.id, recorded.attempt)])
                    return None
            adopted = adopt(self.connection, batch, lane)
            failpoint("relay.after_adopt")
            return adopted
        except FenceLost:
            return None
        except BrokerUnavailable as error:
            self._return_unavailable(batch, str(error))
            return None

    def _load_transactions(self, batches: Sequence[ClaimedBatch]) -> Iterator[list[Loaded]]:
        """
        Yield the messages of one transaction after the other, each within the budget.

        A transaction takes whole batches; if the last one does not fit, the rest of it is split off.
        """
        waiting = list(batches)
        while waiting and (loaded := next(slices(self.connection, waiting, self.sender.breakers.budget), None)):
            batch, rows = loaded.pop()
            waiting = waiting[waiting.index(batch) + 1 :]
            yield [*loaded, *self._split_rest(batch, rows)]

    def _split_rest(self, batch: ClaimedBatch, rows: Sequence[Row]) -> list[Loaded]:
        """Split the messages that were not loaded off a claimed batch; return it with its rows, or [] if the fence was lost."""
        rest = {position: NEXT_ROUND for position in batch.positions if position > rows[-1][1]}
        if not rest:
            return [(batch, rows)]
        try:
            self.splitter.split(batch, rest, split_at_claim)
        except FenceLost:
            return []
        return [(replace(batch, split=batch.split | rest.keys()), rows)]

    def _relay_together(self, loaded: Sequence[Loaded], results: Sequence[BatchSendResult], sent: set[int]) -> None:
        """Send batches in one transaction, and record the result; if the result is unknown, the lane stays unsettled."""
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
            outcomes = iter(self._transactional_broker.send_transaction(self.lane, messages, self._marker(named)))
        failpoint("relay.after_transaction")
        for result, positions_of_batch in zip(results, positions, strict=True):
            result.record(positions_of_batch, islice(outcomes, len(positions_of_batch)))
        reasons = {unaccepted.reason for result in results for unaccepted in result.unaccepted.values()}
        if SplitReason.UNSURE in reasons:
            self._log_unsure(results)
        elif reasons:
            # If something else than an outage made the transaction fail, UNAVAILABLE proves nothing about the topics of the other
            # messages, so these get OTHER_REJECTED.
            for result in results if reasons != {SplitReason.UNAVAILABLE} else ():
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
        sent |= {batch_id for batch_id, _ in named}  # including batches that another relay has marked first
        failpoint("relay.after_mark")
        for batch, rows in loaded:
            self.sender.breakers.record_answer(batch.topic)
            ids = [batch.message_ids[position - 1] for _, position, *_ in rows]
            tracing.record_sent(self.broker.alias, batch.topic, ids)

    def _undo(self, results: Sequence[BatchSendResult], rest: Unaccepted) -> None:
        """
        Return batches that are certainly not published.

        Args:
            rest: the reason of the messages without a result.
        """
        withdraw(self.connection, self.lane, [result.batch for result in results])
        for result in results:
            result.accepted.clear()
            result.complete(rest)
            self._update_breakers(result)
            self._return(result.batch, result.unaccepted)

    def _log_unsure(self, results: Sequence[BatchSendResult]) -> None:
        """Log a transaction that got no answer; its batches stay claimed until the lane is settled."""
        reason = next(unaccepted.text for result in results for unaccepted in result.unaccepted.values())
        batches = sorted(result.batch.id for result in results)
        extra = log_fields(broker=self.broker.alias, lane=self.lane, batches=batches)
        text = "The commit of a transaction of lane %s got no answer. The lane's marker will show whether it was committed. %s"
        logger.warning(text, self.lane, reason, extra=extra)

    def _update_breakers(self, result: BatchSendResult) -> None:
        """Update the breakers after a transaction that failed."""
        breakers, topic = self.sender.breakers, result.batch.topic
        texts = [unaccepted.text for unaccepted in result.unaccepted.values() if unaccepted.reason is SplitReason.UNAVAILABLE]
        if texts:
            breakers.record_no_answer(topic, texts[0])
        elif any(unaccepted.reason is not SplitReason.SHED for unaccepted in result.unaccepted.values()):
            breakers.record_answer(topic)

    def _return_unavailable(self, batch: ClaimedBatch, reason: str) -> None:
        self._return(batch, dict.fromkeys(batch.positions, Unaccepted(SplitReason.UNAVAILABLE, reason)))
        self.sender.breakers.record_no_answer(batch.topic, reason)

    def _return(self, batch: ClaimedBatch, unaccepted: dict[int, Unaccepted]) -> None:
        self.committer.return_unaccepted(BatchSendResult(batch, unaccepted=unaccepted, source=self.source))

    def _marker(self, named: Sequence[tuple[int, int]]) -> str:
        return msgspec.json.encode(Marker(tuple(named), self._database, self._timeline)).decode()

    def _decode_marker(self, text: str | None, lane: int) -> Marker | None:
        return _decode(text, lane, self.broker.alias)


def find_lanes_ahead(connection: Connection, broker: TransactionalSends, source: str, lanes: int) -> dict[int, int]:
    """
    Return the lanes whose markers name batches that the database has never had: lane -> number of these batches.

    If there are any, the database was restored, or failed over and lost commits. This changes nothing.

    Raises:
        BrokerUnavailable: a marker cannot be read now.
        BrokerMisconfigured: a marker cannot be read until an operator acts.
    """
    lanes_ahead = {}
    for lane in range(1, lanes + 1):
        marker = _decode(broker.read_lane_marker(source, lane), lane, broker.alias)
        if marker is not None and (ahead := read_named(connection, lane, marker.sent)[1]):
            lanes_ahead[lane] = ahead
    return lanes_ahead


def _decode(text: str | None, lane: int, broker: str) -> Marker | None:
    """Decode a marker; return None for None. Raises BrokerMisconfigured if another program wrote the text."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Marker)
    except msgspec.MsgspecError as error:
        raise BrokerMisconfigured(
            f"The marker of lane {lane} of broker {broker!r} cannot be read: {error}",
            hint="Only relays of this package may write to the marker topic. Find out which other program does.",
        ) from error
