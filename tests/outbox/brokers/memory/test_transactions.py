"""Transactions of the memory broker whose answer is lost, or which arrive late: only the marker says what happened."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from outbox.brokers.base import Outgoing, SendStatus
from outbox.brokers.memory import MemoryBroker
from outbox.brokers.memory.store import forget
from outbox.message import TopicSpec, TopicType

LANE = 1
SOURCE = "urn:uuid:0191d8a0-0000-7000-8000-000000000001"


@pytest.fixture
def name() -> Iterator[str]:
    name = str(uuid4())
    yield name
    forget(name)


@pytest.fixture
def broker(name: str) -> MemoryBroker:
    broker = MemoryBroker("default", {"NAME": name, "TRANSACTIONS": True}, [TopicSpec("orders", TopicType.NORMAL)])
    broker.open_lane(SOURCE, LANE)
    return broker


def send(broker: MemoryBroker, *message_ids: str, marker: str) -> list[SendStatus]:
    messages = [Outgoing(message_id, "orders", b"{}") for message_id in message_ids]
    return [result.status for result in broker.send_transaction(LANE, messages, marker)]


class TestFail:
    def test_leaves_only_the_marker_to_say_that_a_transaction_was_committed(self, broker: MemoryBroker):
        broker.fail("send_transaction", "unsure", stored=True)

        assert send(broker, "a", "b", marker="batch 1") == [SendStatus.UNSURE] * 2

        assert broker.open_lane(SOURCE, LANE) == "batch 1"
        assert [message.message_id for message in broker.visible("orders")] == ["a", "b"]

    def test_leaves_only_the_marker_to_say_that_it_was_not(self, broker: MemoryBroker):
        broker.fail("send_transaction", "unsure", where=lambda message: message.message_id == "b")

        assert send(broker, "a", "b", marker="batch 1") == [SendStatus.UNSURE] * 2

        assert broker.open_lane(SOURCE, LANE) is None
        assert broker.visible("orders") == []

    def test_lets_a_late_transaction_find_its_lane_taken_over(self, broker: MemoryBroker, name: str):
        broker.fail("send_transaction", "unsure", late=True)
        send(broker, "late", marker="batch 1")
        other = MemoryBroker("default", {"NAME": name, "TRANSACTIONS": True}, [])

        other.open_lane(SOURCE, LANE)
        broker.deliver_late()

        assert broker.visible("orders") == []
        assert other.open_lane(SOURCE, LANE) is None

    def test_lets_a_late_transaction_arrive_while_its_lane_is_held(self, broker: MemoryBroker):
        broker.fail("send_transaction", "unsure", late=True)
        send(broker, "late", marker="batch 1")

        broker.deliver_late()

        assert broker.open_lane(SOURCE, LANE) == "batch 1"
        assert [message.message_id for message in broker.visible("orders")] == ["late"]


class TestDuplicate:
    def test_is_refused_for_a_transaction(self, broker: MemoryBroker):
        with pytest.raises(ValueError, match="cannot arrive twice"):
            broker.duplicate("send_transaction")
