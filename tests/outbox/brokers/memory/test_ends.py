"""The four end semantics, as docs/guarantees.md and protocol BI, BF, BD, BS name them."""

import pytest

from outbox.brokers.base import Ended, EndSemantics, HalfRef, Outgoing
from outbox.brokers.memory import MemoryBroker
from outbox.message import COMMIT, ROLLBACK, Resolution, TopicSpec, TopicType

IDEMPOTENT, FORGETFUL = EndSemantics.IDEMPOTENT, EndSemantics.FORGETFUL
DUPLICATING, STATELESS = EndSemantics.DUPLICATING, EndSemantics.STATELESS
COMMITTED, ROLLED_BACK, DISCARDED, NOT_FOUND = Ended.COMMITTED, Ended.ROLLED_BACK, Ended.DISCARDED, Ended.NOT_FOUND


def broker_with_half(semantics: EndSemantics) -> tuple[MemoryBroker, HalfRef]:
    broker = MemoryBroker("default", {"END": semantics}, [TopicSpec("orders", TopicType.TRANSACTION)])
    [outcome] = broker.send_halves([Outgoing("m", "orders", b"x", token="here:1:1:1")])
    return broker, HalfRef("orders", outcome.half_id, "m")


class TestSecondEnd:
    @pytest.mark.parametrize(
        ("semantics", "ends", "answers", "copies"),
        [
            (IDEMPOTENT, [COMMIT, COMMIT], [COMMITTED, COMMITTED], 1),
            (IDEMPOTENT, [COMMIT, ROLLBACK], [COMMITTED, COMMITTED], 1),
            (IDEMPOTENT, [ROLLBACK, COMMIT], [ROLLED_BACK, ROLLED_BACK], 0),
            (FORGETFUL, [COMMIT, COMMIT], [COMMITTED, NOT_FOUND], 1),
            (FORGETFUL, [ROLLBACK, COMMIT], [ROLLED_BACK, NOT_FOUND], 0),
            (DUPLICATING, [COMMIT, COMMIT], [COMMITTED, COMMITTED], 2),
            (DUPLICATING, [ROLLBACK, COMMIT], [ROLLED_BACK, ROLLED_BACK], 0),
            (STATELESS, [COMMIT, COMMIT], [COMMITTED, COMMITTED], 2),
            (STATELESS, [ROLLBACK, COMMIT], [ROLLED_BACK, COMMITTED], 1),
            (STATELESS, [COMMIT, ROLLBACK], [COMMITTED, ROLLED_BACK], 1),
        ],
    )
    def test_is_answered_and_acts_as_declared(
        self, semantics: EndSemantics, ends: list[Resolution], answers: list[Ended], copies: int
    ):
        broker, half = broker_with_half(semantics)

        heard = [broker.end([half], resolution)[0].ended for resolution in ends]

        assert broker.end_semantics is semantics
        assert heard == answers
        assert broker.copies("m") == copies


class TestEndOfADiscardedHalf:
    @pytest.mark.parametrize(
        ("semantics", "answer", "copies"),
        [(IDEMPOTENT, DISCARDED, 0), (FORGETFUL, NOT_FOUND, 0), (DUPLICATING, DISCARDED, 0), (STATELESS, COMMITTED, 1)],
    )
    def test_is_answered_as_declared(self, semantics: EndSemantics, answer: Ended, copies: int):
        broker, half = broker_with_half(semantics)
        broker.discard_halves()

        [outcome] = broker.end([half], COMMIT)

        assert outcome.ended is answer
        assert broker.copies("m") == copies
