"""Acknowledgements, renewals and returns that a stub of a proxy refuses, or leaves without an answer."""

from collections.abc import Callable
from datetime import timedelta

import grpc
import pytest

from outbox.brokers.base import Broker, Delivery
from outbox.brokers.rocketmq.stubs import Code
from outbox.errors import BrokerUnavailable
from outbox.message import TopicType
from tests.outbox.brokers.rocketmq.stub import Stub

HELD = timedelta(seconds=30)


@pytest.fixture
def broker(stub: Stub, open_at: Callable[..., Broker]) -> Broker:
    return open_at(stub.endpoints)


@pytest.fixture
def held() -> list[Delivery]:
    return [Delivery("group", TopicType.NORMAL, f"m{number}", b"x", receipt=f"r{number}") for number in range(3)]


class TestAck:
    def test_that_has_no_answer_fails_no_others(self, stub: Stub, broker: Broker, held: list[Delivery]):
        stub.fail("AckMessage", grpc.StatusCode.UNAVAILABLE, times=1)

        assert sorted(broker.ack(held)) == [False, True, True]

    @pytest.mark.parametrize(
        ("code", "text"),
        [
            (Code.INVALID_RECEIPT_HANDLE, "receipt handle is expired"),
            (Code.INTERNAL_SERVER_ERROR, "ack failed: status is abnormal"),
        ],
    )
    def test_that_is_refused_is_too_late(self, stub: Stub, broker: Broker, held: list[Delivery], code: int, text: str):
        stub.say("AckMessage", code, text)

        assert broker.ack(held) == [False, False, False]

    def test_raises_where_none_has_an_answer(self, stub: Stub, broker: Broker, held: list[Delivery]):
        stub.say("AckMessage", Code.INTERNAL_SERVER_ERROR, "connect to 10.0.0.7:10911 failed")

        with pytest.raises(BrokerUnavailable, match="connect to"):
            broker.ack(held)


class TestRenew:
    def test_keeps_the_receipts_of_those_that_the_server_answered(self, stub: Stub, broker: Broker, held: list[Delivery]):
        """An answer that is lost leaves its delivery as it was; the others' old receipts are good for nothing any more."""
        stub.fail("ChangeInvisibleDuration", grpc.StatusCode.UNAVAILABLE, times=1)

        renewed = broker.renew(held, HELD)

        receipts = [one.receipt for one in renewed if one is not None]
        assert sorted(receipt.startswith("renewed") for receipt in receipts) == [False, True, True]

    def test_raises_where_the_server_answered_none(self, stub: Stub, broker: Broker, held: list[Delivery]):
        stub.fail("ChangeInvisibleDuration", grpc.StatusCode.UNAVAILABLE)

        with pytest.raises(BrokerUnavailable):
            broker.renew(held, HELD)


class TestRelease:
    def test_raises_where_there_is_no_answer(self, stub: Stub, broker: Broker, held: list[Delivery]):
        stub.fail("ChangeInvisibleDuration", grpc.StatusCode.UNAVAILABLE)

        with pytest.raises(BrokerUnavailable):
            broker.release(held)

    def test_asks_for_all_together(self, stub: Stub, broker: Broker, held: list[Delivery]):
        broker.release(held)

        asked = stub.asked("ChangeInvisibleDuration")
        assert sorted(one.message_id for one in asked) == ["m0", "m1", "m2"]
        assert {one.invisible_duration.ToTimedelta() for one in asked} == {timedelta(milliseconds=1)}
