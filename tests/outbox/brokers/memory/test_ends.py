"""What a second end of a half message does, on brokers of each kind."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from outbox.brokers.base import Ended, EndSemantics, HalfRef, HalfStatus, Outgoing, SendStatus
from outbox.brokers.memory import MemoryBroker
from outbox.message import COMMIT, ROLLBACK, Resolution, TopicSpec, TopicType

IDEMPOTENT, STATELESS = EndSemantics.IDEMPOTENT, EndSemantics.STATELESS
COMMITTED, ROLLED_BACK, DISCARDED = Ended.COMMITTED, Ended.ROLLED_BACK, Ended.DISCARDED
GONE, HIDDEN = HalfStatus.GONE, HalfStatus.HIDDEN


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
        [(IDEMPOTENT, DISCARDED, 0), (STATELESS, COMMITTED, 1)],
    )
    def test_is_answered_as_declared(self, semantics: EndSemantics, answer: Ended, copies: int):
        broker, half = broker_with_half(semantics)

        count = broker.discard_halves()
        [outcome] = broker.end([half], COMMIT)

        assert (count, outcome.ended) == (1, answer)
        assert broker.copies("m") == copies


class TestStanding:
    @pytest.mark.parametrize(
        ("semantics", "after_discard"),
        [(IDEMPOTENT, GONE), (STATELESS, HIDDEN)],
    )
    def test_of_what_was_discarded_is_what_an_end_can_still_do(self, semantics: EndSemantics, after_discard: HalfStatus):
        broker, half = broker_with_half(semantics)
        broker.discard_halves()

        [standing] = broker.look_up_halves([half])
        broker.end([half], COMMIT)

        assert standing is after_discard
        assert broker.copies("m") == (1 if standing is HIDDEN else 0)

    def test_is_not_that_of_another_database(self):
        broker, half = broker_with_half(IDEMPOTENT)
        broker.end([half], COMMIT)

        assert broker.look_up_halves([replace(half, source="urn:uuid:another")]) == [GONE]


class TestCommitWindow:
    def test_is_an_option(self):
        broker = MemoryBroker("default", {"END": STATELESS, "COMMIT_WINDOW": timedelta(seconds=2)}, [])

        assert broker.commit_window == timedelta(seconds=2)

    def test_is_none_where_a_second_end_does_no_harm(self):
        broker = MemoryBroker("default", {"COMMIT_WINDOW": timedelta(seconds=2)}, [])

        assert broker.commit_window is None

    def test_that_is_over_lets_no_end_leave(self):
        broker, half = broker_with_half(STATELESS)

        [outcome] = broker.end([half], COMMIT, within=timedelta(0))

        assert outcome.status is SendStatus.UNAVAILABLE
        assert broker.look_up_halves([half]) == [HIDDEN]
