"""Requests for messages at a stub of a proxy: trouble with one topic, what nobody takes, the end of the broker."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import grpc
import pytest

from outbox.brokers.base import Broker, Delivery, Outgoing
from outbox.brokers.rocketmq import receiver
from outbox.brokers.rocketmq.codec import to_proto
from outbox.brokers.rocketmq.stubs import definition
from outbox.errors import BrokerUnavailable
from outbox.logs import REPEAT_SECONDS
from outbox.message import TopicType
from tests.outbox.brokers.rocketmq.stub import Stub
from tests.waiting import wait_until

OpenAt = Callable[..., Broker]
Pass = Callable[[float], None]

NORMAL, FIFO = TopicType.NORMAL, TopicType.FIFO
HELD = timedelta(minutes=5)
AWAY = (grpc.StatusCode.DEADLINE_EXCEEDED, "no time left")


def put(stub: Stub, topic: TopicType, body: bytes, tag: str = "") -> None:
    """Store a message that waits on a topic."""
    message = to_proto(
        Outgoing(body.decode(), topic, body, tag=tag, key="k"),
        topic,
        body.decode(),
        definition.Resource(name=topic),
        now=time.time(),
        compress_above=None,
    )
    message.system_properties.receipt_handle = f"0 1 2 0 0 broker-a 0 {body.decode()} 0"
    message.system_properties.delivery_attempt = 1
    stub.put[topic].put(message)


def receive(broker: Broker, *topics: TopicType, hold: timedelta = HELD, wait: float = 0.5, limit: int = 10) -> list[Delivery]:
    return broker.receive("group", topics, limit=limit, invisible_for=hold, wait=timedelta(seconds=wait))


def asked_brokers(stub: Stub) -> list[str]:
    """Return the names of the brokers that requests for messages went to."""
    return [request.message_queue.broker.name for request in stub.asked("ReceiveMessage")]


def handed_back(stub: Stub) -> list[str]:
    return [one.message_id for one in stub.asked("ChangeInvisibleDuration")]


@pytest.fixture
def broker(stub: Stub, open_at: OpenAt) -> Broker:
    return open_at(stub.endpoints)


class TestReceive:
    def test_asks_for_all_tags(self, stub: Stub, broker: Broker):
        put(stub, NORMAL, b"a", tag="placed")

        [delivery] = receive(broker, NORMAL)

        [announced] = {
            (one.topic.name, one.expression.expression)
            for request in stub.asked("Telemetry")
            for one in request.settings.subscription.subscriptions
        }
        assert announced == (NORMAL, "*")
        assert {request.filter_expression.expression for request in stub.asked("ReceiveMessage")} == {"*"}
        assert delivery.tag == "placed"

    def test_keeps_what_comes_beyond_the_limit_for_the_next_call(self, stub: Stub, broker: Broker):
        put(stub, NORMAL, b"a")
        put(stub, FIFO, b"b")
        seen = [delivery.body for _ in range(2) for delivery in receive(broker, NORMAL, FIFO, limit=1)]

        assert sorted(seen) == [b"a", b"b"]

    def test_hands_back_what_nobody_takes_when_half_its_time_is_over(self, stub: Stub, broker: Broker):
        put(stub, NORMAL, b"a")
        receive(broker, FIFO, wait=0.1)
        hold = timedelta(seconds=1)

        while not receive(broker, NORMAL, FIFO, hold=hold, limit=1):  # the request for the ordered topic stays open
            pass
        put(stub, FIFO, b"late")

        wait_until(lambda: handed_back(stub) == ["late"])
        assert receive(broker, FIFO, wait=0.1) == []

    def test_asks_to_hide_messages_no_longer_than_the_server_can(self, stub: Stub, broker: Broker):
        receive(broker, NORMAL, hold=timedelta.max, wait=0.1)

        [request] = stub.asked("ReceiveMessage")
        assert request.invisible_duration.ToTimedelta() == timedelta(hours=12)


class TestTroubleWithOneTopic:
    def test_costs_the_others_nothing(self, stub: Stub, broker: Broker, caplog: pytest.LogCaptureFixture):
        stub.failing[FIFO] = AWAY
        seen = []

        with caplog.at_level(logging.WARNING, "outbox.brokers.rocketmq"):
            for number in range(20):
                put(stub, NORMAL, b"%d" % number)
                seen += [delivery.body for delivery in receive(broker, NORMAL, FIFO, wait=10)]

        assert seen == [b"%d" % number for number in range(20)]
        [line] = [record.getMessage() for record in caplog.records]
        assert "Group group cannot receive messages of topic fifo" in line
        assert "no time left" in line

    def test_is_logged_when_it_comes_back_within_a_minute_and_lasts(
        self, stub: Stub, broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, pass_in_log: Pass
    ):
        monkeypatch.setattr(receiver, "RETRY_SECONDS", 0.05)
        stub.failing[FIFO] = AWAY
        wait_until(lambda: caplog.records or receive(broker, NORMAL, FIFO, wait=0.2))
        stub.failing.clear()
        put(stub, FIFO, b"between")
        wait_until(lambda: receive(broker, NORMAL, FIFO, wait=0.2))
        stub.failing[FIFO] = AWAY
        for _ in range(4):
            receive(broker, NORMAL, FIFO, wait=0.2)

        pass_in_log(REPEAT_SECONDS)

        wait_until(lambda: receive(broker, NORMAL, FIFO, wait=0.2) or len(caplog.records) == 2, seconds=10)
        assert "Group group cannot receive messages of topic fifo" in caplog.messages[-1]

    def test_is_left_alone_for_a_moment(self, stub: Stub, broker: Broker):
        stub.failing[FIFO] = AWAY

        receive(broker, NORMAL, FIFO, wait=0.2, limit=1)
        receive(broker, NORMAL, FIFO, wait=0.2, limit=1)

        asked = [request.message_queue.topic.name for request in stub.asked("ReceiveMessage")]
        assert asked.count(FIFO) == 1
        assert asked.count(NORMAL) == 2

    def test_is_over_as_soon_as_it_is_over(self, stub: Stub, broker: Broker):
        """Even within a call that waits for the others."""
        stub.failing[FIFO] = AWAY
        put(stub, FIFO, b"ordered")
        recovery = threading.Timer(1, stub.failing.clear)
        recovery.start()

        found = receive(broker, NORMAL, FIFO, wait=30, limit=1) or receive(broker, NORMAL, FIFO, wait=30, limit=1)

        recovery.join()
        assert [delivery.body for delivery in found] == [b"ordered"]

    def test_is_no_error_while_the_others_have_nothing(self, stub: Stub, broker: Broker):
        stub.failing[FIFO] = AWAY

        assert receive(broker, NORMAL, FIFO) == []

    @pytest.mark.parametrize("topics", [[FIFO], [NORMAL, FIFO]], ids=str)
    def test_is_an_error_where_it_is_all_topics(
        self, stub: Stub, broker: Broker, topics: list[TopicType], caplog: pytest.LogCaptureFixture
    ):
        stub.failing |= dict.fromkeys(topics, AWAY)

        for _ in range(2):  # no topic is left alone where all are in trouble: the caller waits between calls
            with pytest.raises(BrokerUnavailable, match="DEADLINE_EXCEEDED no time left"):
                receive(broker, *topics)

        asked = {request.message_queue.topic.name for request in stub.asked("ReceiveMessage")}
        assert asked == set(topics)
        assert caplog.records == []  # whoever calls has heard of it


class TestSeveralBrokers:
    @pytest.fixture(params=[NORMAL, FIFO])
    def topic(self, request: pytest.FixtureRequest) -> TopicType:
        return request.param

    @pytest.fixture
    def other(self, stub: Stub) -> Iterator[Stub]:
        other = Stub()
        stub.brokers = [stub, other]
        yield other
        other.stop()

    @pytest.mark.parametrize("limit", [1, 10])
    def test_are_each_waited_for(self, stub: Stub, other: Stub, broker: Broker, topic: TopicType, limit: int):
        receive(broker, topic, wait=0.1)  # reads the route
        before = len(asked_brokers(stub)), len(asked_brokers(other))

        receive(broker, topic, wait=0.1, limit=limit)

        assert set(asked_brokers(stub)[before[0] :]) == {"broker-a"}
        assert set(asked_brokers(other)[before[1] :]) == {"broker-b"}

    def test_are_each_waited_for_as_soon_as_the_route_is_known(self, stub: Stub, other: Stub, broker: Broker, topic: TopicType):
        put(other, topic, b"b")
        put(stub, topic, b"a")

        found = [delivery for _ in range(2) for delivery in receive(broker, topic, wait=25, limit=1)]

        assert sorted(delivery.body for delivery in found) == [b"a", b"b"]

    def test_receive_from_one_while_another_fails(
        self, stub: Stub, other: Stub, broker: Broker, topic: TopicType, caplog: pytest.LogCaptureFixture
    ):
        receive(broker, topic, wait=0.1)
        other.failing[topic] = AWAY
        seen = []

        for number in range(20):
            put(stub, topic, b"%d" % number)
            seen += [delivery.body for delivery in receive(broker, topic, wait=10)]

        assert seen == [b"%d" % number for number in range(20)]
        assert [text for text in caplog.messages if "cannot receive" not in text] == []
        assert len(caplog.messages) == 1


class TestClose:
    def test_hands_back_what_was_not_taken(self, stub: Stub, broker: Broker):
        put(stub, NORMAL, b"a")
        put(stub, FIFO, b"b")
        [taken] = receive(broker, NORMAL, FIFO, limit=1)
        receive(broker, TopicType.TRANSACTION)  # meanwhile the other comes, too

        broker.close()

        assert sorted([taken.message_id, *handed_back(stub)]) == ["a", "b"]

    def test_ends_a_call_under_way(self, stub: Stub, broker: Broker):
        closing = threading.Timer(0.5, broker.close)
        closing.start()
        began = time.monotonic()

        try:
            found = receive(broker, NORMAL, wait=20)
        except BrokerUnavailable:
            found = []

        closing.join()
        assert found == []
        assert time.monotonic() - began < 15

    @pytest.mark.parametrize("is_used", [True, False])
    def test_leaves_nothing_half_open(self, stub: Stub, broker: Broker, is_used: bool):
        put(stub, NORMAL, b"a")
        unused = [Delivery("group", NORMAL, "a", b"a", "0 1")]
        held = wait_until(lambda: receive(broker, NORMAL, FIFO, wait=0.1)) if is_used else unused
        broker.close()
        broker.close()
        before = len(stub.requests)

        acts: list[Callable[[], Any]] = [
            lambda: receive(broker, NORMAL),
            lambda: broker.renew(held, HELD),
            lambda: broker.release(held),
            lambda: broker.ack(held),
        ]
        for act in acts:
            with pytest.raises(BrokerUnavailable, match="is closed"):
                act()

        broker.interrupt()
        assert len(stub.requests) == before


class TestInterrupt:
    def test_ends_calls_that_begin_after_it(self, stub: Stub, broker: Broker):
        broker.interrupt()
        began = time.monotonic()

        assert receive(broker, NORMAL, wait=20) == []
        assert time.monotonic() - began < 15
