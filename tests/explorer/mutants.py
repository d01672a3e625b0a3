"""Rules that are taken out of the framework, one at a time, to see that a schedule fails without each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch
from uuid import UUID

from outbox import database
from outbox.batches import split, steps
from outbox.batches.half_first import Tombstone
from outbox.check_backs import resolve
from outbox.consuming import deferred, handle
from outbox.half_first.message import HalfFirstMessage
from outbox.message import Resolution
from outbox.models import State
from outbox.relay.commit import Committer
from outbox.relay.rounds import Relay
from outbox.relay.transactions import Marker, TransactionalSender
from tests.explorer.schedules import Scope

FENCE = "AND attempt = %(attempt)s"
DECISIONS = ((steps, "DECIDE"), (split, "SPLIT_AT_DECISION"))


@dataclass(frozen=True, slots=True)
class Mutant:
    """
    A rule that is taken out.

    Args:
        rule: what the framework does no more.
        scope: the schedules that may fail then.
        kinds: the problems that it leads to.
        patches: context managers in which the rule is out.
    """

    rule: str
    scope: Scope
    kinds: frozenset[str]
    patches: Callable[[], Sequence[Any]]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Take the rule out inside the block."""
        with ExitStack() as stack:
            for one in self.patches():
                stack.enter_context(one)
            yield


def _without_fence() -> Sequence[Any]:
    return [patch.object(of, name, getattr(of, name).replace(FENCE, "")) for of, name in DECISIONS]


def _missing_row_is_rolled_back() -> Sequence[Any]:
    def look(connection: database.Connection, message_id: UUID, **options: Any) -> Tombstone:
        found = connection.execute("SELECT 1 FROM outbox_message WHERE id = %s", [message_id]).fetchone()
        return Tombstone.WRITTEN if found is None else Tombstone.ROW_IS_THERE

    return [patch.object(resolve, "write_tombstone", look)]


def _mark_before_send() -> Sequence[Any]:
    def relay_one_phase(self: Relay, batches: Any, shed_at: float) -> Any:
        sent = self.committer.mark(batches, state=State.CLAIMED)
        return self._sender.send(batches, is_half=False, shed_at=shed_at), sent

    return [patch.object(Relay, "_relay_one_phase", relay_one_phase)]


def _inbox_apart() -> Sequence[Any]:
    claim = handle.claim

    def claim_and_commit(entry: Any, using: str) -> Any:
        claimed = claim(entry, using)
        database.raw(using).commit()
        return claimed

    return [patch.object(handle, "claim", claim_and_commit)]


def _without(statement: str, *rules: str) -> Callable[[], Sequence[Any]]:
    """Return what takes rules out of a statement about deferred messages."""

    def patches() -> Sequence[Any]:
        text = getattr(deferred, statement)
        for rule in rules:
            assert rule in text, rule
            text = text.replace(rule, "")
        return [patch.object(deferred, statement, text)]

    return patches


def _marker_not_asked() -> Sequence[Any]:
    def read(self: TransactionalSender, text: str | None, lane: int) -> Marker | None:
        return None if text is None else Marker()

    return [patch.object(TransactionalSender, "_decode_marker", read)]


def _commit_before_decision() -> Sequence[Any]:
    decide = Committer.decide

    def commit_and_decide(self: Committer, result: Any) -> Any:
        self.end([result.half(position) for position in result.accepted], Resolution.COMMIT)
        return decide(self, result)

    return [patch.object(Committer, "decide", commit_and_decide)]


def _commit_before_database() -> Sequence[Any]:
    send = HalfFirstMessage.send

    def send_and_commit(self: HalfFirstMessage, prepared: Any, *, about: Any) -> None:
        send(self, prepared, about=about)
        self._end(Resolution.COMMIT)

    return [patch.object(HalfFirstMessage, "send", send_and_commit)]


def _half_id_not_compared() -> Sequence[Any]:
    judge = resolve._judge

    def judge_any_half(batch: Any, half: Any, token: Any) -> Any:
        if batch.state in (State.PREPARED, State.SENT) and token.attempt == batch.attempt and not batch.is_split:
            return resolve._commit("any half message", is_being_ended=batch.is_being_ended)
        return judge(batch, half, token)

    return [patch.object(resolve, "_judge", judge_any_half)]


def _claimed_is_rolled_back() -> Sequence[Any]:
    judge = resolve._judge

    def judge_by_reading(batch: Any, half: Any, token: Any) -> Any:
        if batch.state == State.CLAIMED and token.attempt == batch.attempt:
            return resolve._rollback("read, and not fenced")
        return judge(batch, half, token)

    return [patch.object(resolve, "_judge", judge_by_reading)]


def _no_resend() -> Sequence[Any]:
    """
    Sends nothing again that the broker has rolled back or discarded.

    That second net would catch what the rules beside it let fall; by itself it is needed only where a broker discards.
    """
    return [patch.object(Committer, "_return_gone", lambda self, result: None)]


def _also_no_resend(patches: Callable[[], Sequence[Any]]) -> Callable[[], Sequence[Any]]:
    return lambda: [*patches(), *_no_resend()]


LOST, DOUBLE = "lost", "double"

LOSSES = frozenset({LOST, "unfinished"})

MEMORY = ("idempotent", "stateless")
ONCE = ("embedded", "idempotent")  # with half messages
RELAYS = Scope(ONCE, ("check-backs",), refuses=False)

MUTANTS: dict[str, Mutant] = {
    "fence": Mutant("The attempt is compared where a relay decides *", RELAYS, LOSSES, _also_no_resend(_without_fence)),
    "tombstone": Mutant(
        "A check-back takes the place of a missing row before it answers ROLLBACK *",
        Scope(ONCE, ("half first",), refuses=False),
        LOSSES,
        _also_no_resend(_missing_row_is_rolled_back),
    ),
    "send-first": Mutant(
        "A message is sent before it is marked", Scope(MEMORY, ("relays",), refuses=False), LOSSES, _mark_before_send
    ),
    "inbox": Mutant(
        "The inbox row is in the handler's transaction",
        Scope(("embedded", *MEMORY), ("consumers",)),
        frozenset({"unhandled", "inbox"}),
        _inbox_apart,
    ),
    "marker": Mutant(
        "The marker decides about a transaction without an answer",
        Scope(("transactions",), ("relays",)),
        frozenset({DOUBLE}),
        _marker_not_asked,
    ),
    "decision": Mutant("A half message is committed after the decision", RELAYS, frozenset({DOUBLE}), _commit_before_decision),
    "database-first": Mutant(
        "A half message that went first is committed after its transaction",
        Scope(ONCE, ("half first",)),
        frozenset({"ghost"}),
        _commit_before_database,
    ),
    "half-id": Mutant(
        "A check-back compares the half message with the decided one",
        Scope(("idempotent",), ("check-backs",)),
        frozenset({DOUBLE}),
        _half_id_not_compared,
    ),
    "fenced-answer": Mutant(
        "A check-back fences a claimed batch before it answers ROLLBACK *",
        RELAYS,
        LOSSES,
        _also_no_resend(_claimed_is_rolled_back),
    ),
    "resend": Mutant(
        "A decided message is sent again when the broker has discarded its half message",
        Scope(("idempotent",), ("check-backs",)),
        LOSSES,
        _no_resend,
    ),
}
