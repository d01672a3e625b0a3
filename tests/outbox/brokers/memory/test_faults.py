"""Faults of the memory broker: the caller's result, and the effect on the message."""

import pytest
from msgspec.structs import replace

from outbox.brokers.base import Ended, HalfRef, HalfStatus, Outgoing, SendStatus
from outbox.brokers.memory import MemoryBroker
from outbox.message import COMMIT, ROLLBACK, TopicSpec, TopicType

TOPICS = [TopicSpec("orders", TopicType.TRANSACTION), TopicSpec("news", TopicType.NORMAL)]


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker("default", {}, TOPICS)


def half(message_id: str) -> Outgoing:
    return Outgoing(message_id, "orders", b"x", token="here:1:1:1")


def news(message_id: str) -> Outgoing:
    return Outgoing(message_id, "news", b"x")


def ref(broker: MemoryBroker) -> HalfRef:
    [outcome] = broker.send_halves([half("m")])
    return HalfRef("orders", outcome.half_id, "m")


class TestFail:
    @pytest.mark.parametrize("verdict", [one for one in SendStatus if one is not SendStatus.ACCEPTED])
    def test_answers_as_planned_and_loses_the_request(self, broker: MemoryBroker, verdict: SendStatus):
        broker.fail("send", verdict, reason="so planned")

        [outcome] = broker.send([news("m")])

        assert (outcome.status, outcome.reason) == (verdict, "so planned")
        assert broker.copies("m") == 0

    def test_loses_only_the_answer_when_stored(self, broker: MemoryBroker):
        broker.fail("send_halves", SendStatus.UNSURE, stored=True)

        [outcome] = broker.send_halves([half("m")])

        assert (outcome.status, outcome.half_id) == (SendStatus.UNSURE, "")
        assert [stored.message.message_id for stored in broker.halves()] == ["m"]

    def test_delays_the_request_when_late(self, broker: MemoryBroker):
        given = ref(broker)
        broker.fail("end", SendStatus.UNSURE, late=True)

        broker.end([given], COMMIT)
        before = broker.copies("m")
        count = broker.deliver_late()

        assert (before, count, broker.copies("m")) == (0, 1, 1)

    def test_lets_a_late_end_lose_against_a_check(self, broker: MemoryBroker):
        given = ref(broker)
        broker.fail("end", SendStatus.UNSURE, late=True)
        broker.end([given], COMMIT)

        broker.end([given], ROLLBACK)
        broker.deliver_late()

        assert broker.copies("m") == 0

    def test_meets_so_many_messages_that_fit_and_no_more(self, broker: MemoryBroker):
        broker.fail("send", SendStatus.REFUSED, times=2, where=lambda message: message.message_id != "a")

        outcomes = broker.send([news(name) for name in "abcd"])

        assert [outcome.status.value for outcome in outcomes] == ["accepted", "refused", "refused", "accepted"]

    def test_goes_on_until_it_is_healed(self, broker: MemoryBroker):
        broker.fail("send", SendStatus.UNAVAILABLE, times=None)
        failed = broker.send([news("a"), news("b")])

        broker.heal()

        assert {outcome.status for outcome in failed} == {SendStatus.UNAVAILABLE}
        assert broker.send([news("a")])[0].status is SendStatus.ACCEPTED


class TestDuplicate:
    def test_stores_two_halves_and_tells_of_one(self, broker: MemoryBroker):
        broker.duplicate("send_halves")

        [outcome] = broker.send_halves([half("m")])

        first, second = broker.halves()
        assert outcome.half_id == first.id != second.id

    def test_leaves_a_half_message_that_has_its_id_where_it_is(self, broker: MemoryBroker):
        named = replace(half("m"), half_id=broker.new_half_id("m"))
        broker.duplicate("send_halves")

        [stored] = broker.send_halves([named])
        [ended] = broker.end([HalfRef(named.topic, stored.half_id, "m", stored.place)], COMMIT)

        assert ended.ended is Ended.COMMITTED

    def test_shows_a_message_twice(self, broker: MemoryBroker):
        broker.duplicate("send")

        broker.send([news("m")])

        assert broker.copies("m") == 2


class TestName:
    def test_is_shared_by_brokers_of_one_name_only(self):
        ours, same, other = (MemoryBroker("default", {"NAME": name}, TOPICS) for name in ("a", "a", "b"))

        ours.send([news("m")])

        assert (same.copies("m"), other.copies("m")) == (1, 0)
        assert [message.message_id for message in same.visible("news")] == ["m"]

    def test_is_nobodys_when_empty(self):
        ours, other = (MemoryBroker("default", {}, TOPICS) for _ in range(2))

        ours.send([news("m")])

        assert other.copies("m") == 0


class TestFailOfALookUp:
    @pytest.mark.parametrize("verdict", [HalfStatus.UNKNOWN, HalfStatus.UNPROVEN, HalfStatus.GONE])
    def test_says_as_planned(self, broker: MemoryBroker, verdict: HalfStatus):
        given = ref(broker)
        broker.fail("look_up_halves", verdict)

        assert broker.look_up_halves([given, given]) == [verdict, HalfStatus.HIDDEN]

    @pytest.mark.parametrize("verdict", ["unavailable", SendStatus.UNSURE])
    def test_tells_nothing_in_trouble(self, broker: MemoryBroker, verdict: str):
        given = ref(broker)
        broker.fail("look_up_halves", verdict, times=None)

        assert broker.look_up_halves([given]) == [HalfStatus.UNKNOWN]
        broker.heal()
        assert broker.look_up_halves([given]) == [HalfStatus.HIDDEN]

    def test_refuses_what_no_broker_says(self, broker: MemoryBroker):
        with pytest.raises(ValueError, match="'lost' is not a status"):
            broker.fail("look_up_halves", "lost")
