"""
A model of one key of an ordered topic: go through schedules of two relays and an operator, statement by statement.

The steps are the real statements on the real tables. Each step is undone by a savepoint, so that all steps which are possible in
a state are tried, and a state that was seen before is not tried again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

from outbox import database
from outbox.batches.batch import BatchSendResult, ClaimedBatch, SplitReason, Unaccepted
from outbox.batches.operators import replay_messages, resend
from outbox.database.locks import Lock
from outbox.models import State
from outbox.relay.commit import Committer
from tests.factories import TicketFactory, TopicFactory
from tests.outbox.relay.claiming import claims

KEY = 1
FAR = datetime(2200, 1, 1, tzinfo=UTC)

Step = Callable[[], str | None]
"""A step of the model; returns its fault, "" for none, None where it did nothing."""

MESSAGE_STATES = "SELECT id::text, state FROM outbox_message_state WHERE topic_id = %s"
TICKETS = "SELECT message_id::text FROM outbox_ticket WHERE topic_id = %s ORDER BY pos"

BATCHES = """
SELECT lane, first_seq, message_ids::text[], order_keys, split, state,
    rank() OVER (ORDER BY coalesce(origin_id, id))
FROM outbox_batch batch WHERE topic_id = %s ORDER BY id
"""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many failed sends and acts of the operator a schedule may still have."""

    failures: int
    acts: int


@dataclass(slots=True)
class OrderModel:
    """
    Waiting messages of one key, two relays and an operator.

    A relay may claim a message only when all messages of its key before it are sent; and where no relay holds one, it can claim
    the first that is not sent, unless that is dead.

    Args:
        last_numbers: lane -> the number that it gave last.
        faults: schedules at whose end a later message was claimed before an earlier one, or the first one could not be claimed.
    """

    committer: Committer
    last_numbers: dict[int, int]
    size: int = 3
    messages: list[str] = field(init=False)
    topic_id: int = field(init=False)
    connection: database.Connection = field(init=False)
    held: dict[int, ClaimedBatch] = field(default_factory=dict)
    seen: set[object] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connection = database.raw("default")
        topic = TopicFactory(type="fifo")
        self.topic_id = topic.id
        self.messages = [str(TicketFactory(topic=topic, order_key=KEY).message_id) for _ in range(self.size)]
        for lane, last in self.last_numbers.items():
            self.connection.execute(f"SELECT pg_advisory_lock({Lock.LANE}, %s)", [lane])  # its relay lives
            self.connection.execute("INSERT INTO outbox_lane VALUES (%s, %s, %s)", [topic.id, lane, last])

    def close(self) -> None:
        """Release the lanes."""
        for lane in self.last_numbers:
            self.connection.execute(f"SELECT pg_advisory_unlock({Lock.LANE}, %s)", [lane])

    def explore(self, budget: Budget, path: Sequence[str] = ()) -> None:
        """Try all steps that are possible now, and after each of them all that are possible then."""
        if self.faults or not self._is_new(budget):
            return
        states = self._states()
        if not self.held and (fault := self._stuck(states)):
            self.faults.append(" > ".join([*path, fault]))
        for name, step, left in self._steps(states, budget):
            before = dict(self.held)
            with self.connection.transaction(force_rollback=True):
                fault = step()
                if fault:
                    self.faults.append(" > ".join([*path, name, fault]))
                elif fault is not None:
                    self.explore(left, [*path, name])
            self.held = before

    def _is_new(self, budget: Budget) -> bool:
        tables = [self.connection.execute(rows, [self.topic_id]).fetchall() for rows in (TICKETS, BATCHES)]
        state = repr((budget, tables, sorted((lane, batch.message_ids) for lane, batch in self.held.items())))
        is_new = state not in self.seen
        self.seen.add(state)
        return is_new

    def _states(self) -> list[str]:
        states = dict(self.connection.execute(MESSAGE_STATES, [self.topic_id]).fetchall())
        return [states[message] for message in self.messages]

    def _steps(self, states: list[str], budget: Budget) -> Iterator[tuple[str, Step, Budget]]:
        """Yield each step that is possible: its name, what it does, and the budget after it."""
        for lane in self.last_numbers:
            if lane not in self.held:
                for limit in (1, 2) if lane == 1 else (1,):
                    yield f"relay {lane} claims {limit}", partial(self._claim, states, lane, limit), budget
                yield f"relay {lane} claims again", partial(self._claim, states, lane, None), budget
                continue
            yield f"relay {lane} is answered: all stored", partial(self._settle, lane, None), budget
            if budget.failures:
                left = replace(budget, failures=budget.failures - 1)
                for reason in (SplitReason.REFUSED, SplitReason.UNSURE):
                    yield f"relay {lane} is answered: first {reason}", partial(self._settle, lane, reason), left
        if budget.acts:
            left = replace(budget, acts=budget.acts - 1)
            sent = [n for n, state in enumerate(states) if state == "sent"]
            for chosen in sorted((n, other) for n in sent for other in sent):  # in both orders, and one alone
                yield f"resend {chosen}", partial(self._resend, list(dict.fromkeys(chosen))), left
            for n in (n for n, state in enumerate(states) if state == "dead"):
                yield f"retry {n}", partial(self._replay, n), left

    def _claim(self, states: list[str], lane: int, limit: int | None) -> str | None:
        """Claim tickets, or a batch again; a fault where a message before the claimed ones is not sent."""
        mine = claims(self.connection, lane)
        batches = mine.claim_ordered(limit=limit) if limit else [mine.reclaim()]
        if not batches or batches[0] is None:
            return None
        (batch,) = batches
        self.held[lane] = batch
        claimed = [self.messages.index(batch.message_ids[position - 1]) for position in batch.positions]
        open_before = [n for n in range(min(claimed)) if states[n] not in ("sent", "discarded")]
        if claimed != sorted(claimed) or open_before:
            return f"{claimed} claimed before {open_before}: {states}"
        return ""

    def _settle(self, lane: int, reason: SplitReason | None) -> str:
        """Mark a batch sent; or its first message was not accepted, and the others of its key were held back."""
        batch = self.held.pop(lane)
        if reason is None:
            self.committer.mark([batch], state=State.CLAIMED)
            return ""
        first, *others = batch.positions
        unaccepted = {first: Unaccepted(reason, reason)} | {n: Unaccepted(SplitReason.HELD, "held") for n in others}
        self.committer.return_unaccepted(BatchSendResult(batch, {}, unaccepted))
        return ""

    def _resend(self, chosen: Sequence[int]) -> str:
        done = resend(self.connection, [UUID(self.messages[n]) for n in chosen], lost_before=FAR)
        assert done.messages == len(chosen)
        return ""

    def _replay(self, n: int) -> str:
        assert replay_messages(self.connection, [UUID(self.messages[n])], by="operator").messages == 1
        return ""

    def _stuck(self, states: list[str]) -> str:
        """Return a fault where the first message that is not sent can be claimed by no relay, though it is not dead."""
        first = next((n for n, state in enumerate(states) if state not in ("sent", "discarded")), None)
        if first is None or states[first] == "dead":
            return ""
        with self.connection.transaction(force_rollback=True):
            mine = claims(self.connection, 1)
            batch = mine.reclaim() if states[first] != "waiting" else next(iter(mine.claim_ordered()), None)
        if batch is None or self.messages[first] not in batch.message_ids:
            return f"{first} cannot be claimed: {states}"
        return ""
