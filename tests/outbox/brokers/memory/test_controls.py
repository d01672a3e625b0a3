"""The memory broker's methods for tests, apart from faults."""

from datetime import UTC, datetime, timedelta

import pytest

from outbox.brokers.base import Outgoing
from outbox.brokers.memory import MemoryBroker
from outbox.message import COMMIT, TopicSpec, TopicType

TOPICS = [TopicSpec("orders", TopicType.TRANSACTION), TopicSpec("news", TopicType.NORMAL)]
NONE, MINUTE = timedelta(0), timedelta(minutes=1)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker("default", {}, TOPICS)


def receive(broker, topic="news"):
    return broker.receive("group", {topic: None}, limit=10, invisible_for=MINUTE, wait=NONE)


class TestFail:
    def test_takes_a_verdict_by_its_value(self, broker):
        broker.fail("send", "refused")

        [outcome] = broker.send([Outgoing("m", "news", b"x")])

        assert outcome.status == "refused"

    def test_says_which_calls_there_are(self, broker):
        with pytest.raises(
            ValueError, match=r"'sent' cannot fail. Choices are: send, send_halves, end, send_transaction, look_up_halves\."
        ):
            broker.fail("sent", "refused")

    @pytest.mark.parametrize(("call", "first"), [("send", "accepted"), ("look_up_halves", "")])
    def test_says_which_verdicts_there_are(self, broker, call, first):
        with pytest.raises(ValueError, match=rf"'down' is not a status\. Choices are: {first}.*refused"):
            broker.fail(call, "down")


class TestShow:
    def test_hands_out_what_nobody_sent(self, broker):
        broker.show(Outgoing("m", "orders", b"x"))

        assert [one.message_id for one in receive(broker, "orders")] == ["m"]


class TestUndecided:
    def test_lists_halves_until_they_end(self, broker):
        broker.send_halves([Outgoing("a", "orders", b"x", token="t"), Outgoing("b", "orders", b"x", token="t")])
        broker.age(MINUTE)
        before = [half.message_id for half in broker.undecided()]

        broker.check_halves(lambda half: COMMIT, limit=1)

        assert before == ["a", "b"]
        assert [half.message_id for half in broker.undecided()] == ["b"]


class TestAge:
    def test_brings_halves_nearer_to_their_check(self, broker):
        broker.send_halves([Outgoing("a", "orders", b"x", token="t")])
        assert broker.check_halves(lambda half: COMMIT) == 0

        broker.age(MINUTE)

        assert broker.check_halves(lambda half: COMMIT) == 1

    def test_brings_messages_nearer_to_their_time(self, broker):
        broker.show(Outgoing("m", "news", b"x", deliver_at=datetime.now(UTC) + MINUTE))

        broker.age(MINUTE)

        assert [one.message_id for one in receive(broker)] == ["m"]

    def test_ends_the_time_of_a_delivery(self, broker):
        broker.show(Outgoing("m", "news", b"x"))
        [delivery] = receive(broker)
        assert receive(broker) == []

        broker.age(MINUTE)

        assert [one.delivery_count for one in receive(broker)] == [2]
        assert broker.ack([delivery]) == [False]
