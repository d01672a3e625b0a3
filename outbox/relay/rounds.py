"""
The relay: it moves the messages of one database to one broker, round by round.

`hosts.py` runs it, for Celery tasks and for the command `outbox_relay`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from random import random
from typing import Any

import msgspec
import psycopg

from outbox import conf
from outbox.batches.batch import BatchSendResult, ClaimedBatch, SplitReason, Unaccepted
from outbox.brokers.base import Broker
from outbox.brokers.capabilities import HalfMessages, TransactionalSends
from outbox.database import Connection
from outbox.database.identity import require_identity
from outbox.errors import FenceLost
from outbox.failpoints import failpoint
from outbox.logs import error_text, get_logger, log_fields
from outbox.message import TopicType
from outbox.models import State
from outbox.outages import Backoff, Random
from outbox.relay.breaker import Breaker, Breakers, BreakerState
from outbox.relay.claims import Claims
from outbox.relay.commit import Committer, Sweeper, SweepResult
from outbox.relay.send import Sender
from outbox.relay.splitter import Splitter
from outbox.relay.transactions import TransactionalSender

logger = get_logger(__name__)


class RelayResult(msgspec.Struct):
    """Counts: claimed batches; claimed, sent and unaccepted messages; lost fences."""

    batches: int = 0
    claimed: int = 0
    sent: int = 0
    unaccepted: int = 0
    fences_lost: int = 0

    def add(self, other: RelayResult) -> None:
        """Add the counts of another round."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


# If it is unknown whether the broker has accepted a message, it is sent again within a second; that maximum doubles each time.
RETRY_BASE, RETRY_LIMIT = timedelta(seconds=1), timedelta(minutes=5)

# The interval of retries if an operator has to correct something; outbox_replay --unsent sends at once.
MISCONFIGURED_RETRY = timedelta(seconds=30)

# A breaker opens after this number of batches in a row got no answer. It stays open for at most a second at first, then for at
# most twice as long each time. The limit is low, so that sending resumes soon after the broker is back.
BREAKER_THRESHOLD = 3
BREAKER_BASE, BREAKER_LIMIT = timedelta(seconds=1), timedelta(seconds=3)


def make_breakers(clock: Callable[[], float] = time.monotonic, random: Random = random) -> Breakers:
    """Return new, closed breakers."""
    backoff = Backoff(BREAKER_BASE, BREAKER_LIMIT, random)
    return Breakers(lambda: Breaker(BREAKER_THRESHOLD, backoff, clock))


class Relay:
    """
    Claims, sends and marks messages, for one broker, over one connection, in one lane.

    A relay may be killed at any point: other relays claim its batches as soon as its connection is gone.

    Args:
        connection: a connection in autocommit, which is used by this relay only and holds the lane. A test may pass Django's
            connection; then the statements join the test's transaction.
        settings: by default `OUTBOX["RELAY"]`.
        breakers: the breakers of earlier relays in this process. By default, new, closed ones.
        clock: a monotonic clock, in seconds.
        random: returns a number from 0 to below 1.
        takes_over: as for `TransactionalSender`.

    Raises:
        NotMigrated: the outbox has no id.
    """

    def __init__(
        self,
        connection: Connection,
        broker: Broker,
        lane: int,
        *,
        settings: conf.RelaySettings | None = None,
        breakers: Breakers | None = None,
        clock: Callable[[], float] = time.monotonic,
        random: Random = random,
        takes_over: bool = False,
    ) -> None:
        settings = settings or conf.settings().relay
        self.connection = connection
        self.broker = broker
        self.lane = lane
        self.total = RelayResult()
        self.is_stopping = False
        self._clock = clock
        self._lease = settings.lease
        self.claims = Claims(
            connection,
            broker.alias,
            lane,
            settings.lease,
            settings.batch_size,
            len(broker.topics),
            TransactionalSends.has(broker),
        )
        self.breakers = breakers or make_breakers(clock, random)
        self._splitter = Splitter(connection, Backoff(RETRY_BASE, RETRY_LIMIT, random), MISCONFIGURED_RETRY)
        self.source = source = require_identity(connection).source
        self.committer = Committer(connection, broker, self._splitter, source, clock)
        self._sweeper = Sweeper(connection, self.committer, settings.sweep_age)
        self._sender = Sender(connection, broker, self.breakers, source, lambda: self.is_stopping, clock)
        self._transactions: TransactionalSender | None = None
        self._shed_at = 0.0  # the time of the clock when half of the lease of the current round's batches is over
        if TransactionalSends.has(broker):
            self._transactions = TransactionalSender(
                connection,
                broker,
                lane,
                source,
                self._sender,
                self._splitter,
                self.committer,
                lambda: self._sender.why_shed(self._shed_at),
                takes_over,
                settings.lanes,
            )
        self._probes_new = True  # whether the last probe preferred new messages to released batches

    def stop(self) -> None:
        """Ask the relay to finish the current send and release the remaining messages; may be called from a signal handler."""
        self.is_stopping = True

    def drain(self) -> RelayResult:
        """
        Relay until nothing can be claimed, the breaker opens, or `stop` is called.

        Raises:
            psycopg.Error: the database failed. Nothing more is sent; other relays settle the claimed batches.
        """
        done = RelayResult()
        while not self.is_stopping:
            result = self.step()
            done.add(result)
            if not result.batches:
                break
        return done

    def step(self, new: Collection[int] = ()) -> RelayResult:
        """
        Do one round: claim batches, send them, record the results. Does nothing while the breaker is open.

        Args:
            new: ids of topics with new messages; only a few of these messages are claimed. By default, all topics are considered.

        Raises:
            BrokerUnavailable: the broker sends in transactions, and the lane cannot be opened. Nothing is claimed.
        """
        done = RelayResult()
        lost_before = self.committer.fences_lost
        if self.breakers.state is not BreakerState.OPEN:
            if self._transactions is not None:
                self._transactions.open_lane()
            began = self._clock()
            groups = self._claim(new)
            if self._transactions is not None and groups:  # one transaction takes batches of all groups
                groups = [[batch for batches in groups for batch in batches]]
            for batches in groups:
                done.add(self._relay(batches, began))
            self.claims.adapt_limit(done.claimed, done.sent, self._clock() - began)
        done.fences_lost = self.committer.fences_lost - lost_before
        self.total.add(done)
        return done

    def sweep(self) -> SweepResult:
        """Settle batches whose commits have been open for a long time. Does nothing while the breaker is open."""
        if not HalfMessages.has(self.broker) or self.breakers.state is BreakerState.OPEN:
            return SweepResult()
        return self._sweeper.sweep()

    def _claim(self, new: Collection[int]) -> list[list[ClaimedBatch]]:
        """
        Claim batches, and return them in groups, each of which may be sent together.

        A half-open breaker allows only a probe. A round for `new` claims only new messages of these topics; any other round
        claims both released batches and new messages.
        """
        open_topics = self.breakers.open_topics
        if self.breakers.state is BreakerState.HALF_OPEN:
            # Prefer a topic that has not failed, since a failed topic may be unavailable although the broker is available again.
            failed = self.breakers.failed_topics
            scopes: list[dict[str, Any]] = [{"without": failed}, *({"only": topic} for topic in failed)]
            probe = next(filter(None, (self._claim_probe(**scope) for scope in scopes)), [])
            return [[batch] for batch in self._release_foreign(probe)]
        if new:
            return [[batch] for batch in self._release_foreign(self.claims.claim_new(new, without=open_topics))]
        unanswered = self._sender.unanswered
        reclaimed = self.claims.reclaim(without=open_topics, but=unanswered)
        claimed = self.claims.claim(without=open_topics)
        ordered = self.claims.claim_ordered(without=open_topics)
        if unanswered and not (reclaimed or claimed or ordered):  # the batch that got no answer last comes after all others
            reclaimed = self.claims.reclaim(without=open_topics)
        two_phase = [batch for batch in claimed if self._is_two_phase(batch)]
        rest = [batch for batch in claimed if batch not in two_phase]
        groups = [[reclaimed] if reclaimed else [], two_phase, rest, ordered]
        return [batches for batches in map(self._release_foreign, groups) if batches]

    def _claim_probe(self, **scope: Any) -> list[ClaimedBatch]:
        """
        Claim a released batch or one new message, to find out whether the broker answers again.

        Released batches and new messages take turns. The batch that got no answer last is claimed only if nothing else waits.
        Otherwise a message that the broker never answers would keep all others waiting.
        """
        self._probes_new = not self._probes_new
        claims: list[Callable[[], list[ClaimedBatch]]] = [
            lambda: _as_list(self.claims.reclaim(but=self._sender.unanswered, **scope)),
            lambda: self.claims.claim(limit=1, **scope) or self.claims.claim_ordered(limit=1, **scope),
        ]
        if self._probes_new:
            claims.reverse()
        return claims[0]() or claims[1]() or _as_list(self.claims.reclaim(**scope))

    def _release_foreign(self, batches: list[ClaimedBatch]) -> list[ClaimedBatch]:
        """Release the batches whose topics the settings do not assign to this broker, for other relays; return the rest."""
        own_batches = [batch for batch in batches if batch.topic in self.broker.topics]
        for batch in batches:
            if batch.topic not in self.broker.topics:
                self.claims.foreign |= {batch.topic}
                reason = f"The settings of this relay do not assign topic {batch.topic!r} to broker {self.broker.alias!r}."
                with suppress(FenceLost):
                    self._splitter.return_batch(batch, dict.fromkeys(batch.positions, Unaccepted(SplitReason.SHED, reason)))
        return own_batches

    def _is_two_phase(self, batch: ClaimedBatch) -> bool:
        return batch.type is TopicType.TRANSACTION and HalfMessages.has(self.broker)

    def _relay(self, batches: Sequence[ClaimedBatch], began: float) -> RelayResult:
        """Send claimed batches and record the results. `began`: the time of the clock just before they were claimed."""
        failpoint("relay.after_claim")
        shed_at = self._shed_at = began + self._lease.total_seconds() / 2
        try:
            if self._transactions is not None:
                results, sent = self._transactions.relay(batches)
            elif self._is_two_phase(batches[0]):
                results, sent = self._relay_two_phase(batches, shed_at)
            else:
                results, sent = self._relay_one_phase(batches, shed_at)
        except psycopg.Error:
            raise
        except Exception as error:
            self._return_after_error(batches, error)
            results, sent = [], set()
        return RelayResult(
            batches=len(batches),
            claimed=sum(len(batch.message_ids) - len(batch.split) for batch in batches),
            sent=sum(len(result.accepted) for result in results if result.batch.id in sent),
            unaccepted=sum(len(result.unaccepted) for result in results),
        )

    def _return_after_error(self, batches: Sequence[ClaimedBatch], error: Exception) -> None:
        """Release batches after an error in the code of the relay, so that they do not stay claimed until their lease is over."""
        reason = f"The relay failed: {error_text(error)}"
        topic, ids = batches[0].topic, [batch.id for batch in batches]
        logger.error("Batches %s of topic %s: %s", ids, topic, reason, exc_info=error, extra=log_fields(topic=topic, batches=ids))
        for batch in batches:
            if positions := batch.positions:
                with suppress(FenceLost):
                    self._splitter.return_batch(batch, dict.fromkeys(positions, Unaccepted(SplitReason.UNSURE, reason)))

    def _relay_one_phase(self, batches: Sequence[ClaimedBatch], shed_at: float) -> tuple[list[BatchSendResult], set[int]]:
        """Send messages, then mark their batches SENT."""
        results = self._sender.send(batches, is_half=False, shed_at=shed_at)
        failpoint("relay.after_send")
        sent = self.committer.mark([result.batch for result in results if not result.unaccepted], state=State.CLAIMED)
        for result in results:
            if result.unaccepted and self.committer.return_unaccepted(result):
                sent.add(result.batch.id)
        return results, sent

    def _relay_two_phase(self, batches: Sequence[ClaimedBatch], shed_at: float) -> tuple[list[BatchSendResult], set[int]]:
        """Send half messages, decide, commit them, then mark their batches SENT."""
        failpoint("relay.before_half")
        results = self._sender.send(batches, is_half=True, shed_at=shed_at)
        failpoint("relay.after_half")
        began = self._clock()
        decided = []
        for result in results:
            if not result.accepted and result.unaccepted:
                self.committer.return_unaccepted(result)
            elif batch := self.committer.decide(result):
                decided.append(batch)
        failpoint("relay.after_decide")
        committed = self.committer.commit(decided, since=began)
        failpoint("relay.after_commit")
        return results, self.committer.conclude(committed)


def _as_list(batch: ClaimedBatch | None) -> list[ClaimedBatch]:
    return [] if batch is None else [batch]
