"""A broker's own port that refuses, stalls and fails as it is told: what becomes of messages. Needs stubs of ours only."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import grpc
import pytest

from outbox.brokers.base import Broker, Ended, HalfRef, Outgoing, SendResult, SendStatus
from outbox.brokers.rocketmq.remoting.requests import (
    END_TRANSACTION,
    GET_BROKER_CONFIG,
    GET_CLUSTER_INFO,
    ROUTE_OF_TOPIC,
    SEND_MESSAGE_V2,
)
from outbox.brokers.rocketmq.stubs import Code
from outbox.message import COMMIT, TopicType
from tests.outbox.brokers.rocketmq.port_stub import PortStub
from tests.outbox.brokers.rocketmq.stub import Stub, Wire
from tests.waiting import wait_until

HALF, NORMAL = TopicType.TRANSACTION, TopicType.NORMAL
SHORT = timedelta(milliseconds=300)
SEND = SEND_MESSAGE_V2

OpenHere = Callable[..., Broker]

ACCEPTED, UNAVAILABLE, UNSURE = SendStatus.ACCEPTED, SendStatus.UNAVAILABLE, SendStatus.UNSURE

STANDS_STILL = {"clock": lambda: 100.0}  # trouble does not pass meanwhile, and none is slow


def message(kind: TopicType = HALF, **fields: Any) -> Outgoing:
    return Outgoing(**{"message_id": "m", "topic": str(kind), "body": b"{}", **fields})


def send(broker: Broker, kind: TopicType = HALF) -> SendResult:
    [outcome] = broker.send_halves([message()]) if kind is HALF else broker.send([message(kind)])
    return outcome


@pytest.fixture
def broker(open_here: OpenHere) -> Broker:
    return open_here()


@pytest.mark.parametrize("kind", [HALF, NORMAL])
class TestSend:
    @pytest.mark.parametrize("code", [1, 10, 11, 12, 14])  # flushed or replicated too late, and others
    def test_counts_as_stored_only_when_the_broker_is_sure(self, port: PortStub, broker: Broker, kind: TopicType, code: int):
        port.say(SEND, code, "too late", does=True)

        outcome = send(broker, kind)

        assert (outcome.status, outcome.half_id, outcome.place) == (UNSURE, "", "")
        assert len(port.asked(SEND)) == 1  # nothing is repeated under one id

    @pytest.mark.parametrize("does", [False, True])
    def test_is_unsure_when_the_connection_breaks_before_the_answer(
        self, port: PortStub, broker: Broker, kind: TopicType, does: bool
    ):
        port.close_at(SEND, does=does)

        outcome = send(broker, kind)

        assert outcome.status is UNSURE
        assert "No answer from RocketMQ" in outcome.reason
        assert len(port.log.messages) == does

    def test_is_unsure_when_no_answer_comes_in_time(self, port: PortStub, open_here: OpenHere, kind: TopicType):
        broker = open_here(REQUEST_TIMEOUT=SHORT)
        port.freeze(SEND)

        assert send(broker, kind).status is UNSURE

    def test_goes_on_over_a_new_connection(self, port: PortStub, open_here: OpenHere, kind: TopicType):
        broker = open_here(REQUEST_TIMEOUT=SHORT)
        port.freeze(SEND, times=1)
        send(broker, kind)

        assert send(broker, kind).status is ACCEPTED

    def test_does_not_go_to_a_broker_that_takes_connections_and_is_frozen(
        self, port: PortStub, open_here: OpenHere, kind: TopicType
    ):
        broker = open_here(REQUEST_TIMEOUT=SHORT, NAME_SERVERS=[], BROKER_ADDRESSES={"broker-a": port.address})
        port.freeze(SEND)
        port.freeze(GET_BROKER_CONFIG)
        send(broker, kind)

        outcome = send(broker, kind)
        port.recover()

        assert outcome.status is UNAVAILABLE
        assert "does not answer" in outcome.reason
        assert len(port.asked(SEND)) == 1
        assert wait_until(lambda: send(broker, kind).status is ACCEPTED)

    def test_has_no_proxy_asked_for_its_topic_while_name_servers_know_no_broker(
        self, stub: Stub, port: PortStub, broker: Broker, kind: TopicType
    ):
        """A proxy that is asked while its broker starts remembers that there is no such topic."""
        port.say(GET_CLUSTER_INFO, 0)

        away = send(broker, kind)
        asked = stub.asked("QueryRoute")
        port.recover()

        assert (away.status, asked) == (UNAVAILABLE, [])
        assert send(broker, kind).status is ACCEPTED

    def test_is_surely_not_stored_when_no_route_is_told_in_time(
        self, stub: Stub, port: PortStub, open_here: OpenHere, kind: TopicType
    ):
        stub.fail("QueryRoute", grpc.StatusCode.DEADLINE_EXCEEDED, "too late")

        assert send(open_here(), kind).status is UNAVAILABLE

    def test_is_surely_not_stored_when_the_broker_is_away(self, port: PortStub, open_here: OpenHere, kind: TopicType):
        broker = open_here(NAME_SERVERS=[], BROKER_ADDRESSES={"broker-a": port.address})
        port.stop()

        outcome = send(broker, kind)

        assert outcome.status is UNAVAILABLE
        assert "Not sent" in outcome.reason

    def test_is_surely_not_stored_when_no_name_server_answers(self, port: PortStub, open_here: OpenHere, kind: TopicType):
        port.say(ROUTE_OF_TOPIC, 1, "not now")

        outcome = send(open_here(), kind)

        assert outcome.status is UNAVAILABLE
        assert "No name server returns the route" in outcome.reason

    def test_is_surely_not_stored_when_no_proxy_tells_the_type_of_the_topic(
        self, stub: Stub, port: PortStub, broker: Broker, kind: TopicType
    ):
        stub.fail("QueryRoute", grpc.StatusCode.UNAVAILABLE, "failed to connect")

        assert send(broker, kind).status is UNAVAILABLE
        assert port.asked(SEND) == []

    def test_waits_for_an_operator_when_credentials_are_refused(self, port: PortStub, open_here: OpenHere, kind: TopicType):
        port.say(SEND, 16, "signature does not match")

        outcome = send(open_here(ACCESS_KEY="me", SECRET_KEY="not it"), kind)

        assert outcome == SendResult(SendStatus.MISCONFIGURED, reason="RocketMQ says 16 signature does not match.")

    def test_waits_for_an_operator_when_settings_name_other_brokers(self, port: PortStub, open_here: OpenHere, kind: TopicType):
        outcome = send(open_here(NAME_SERVERS=[], BROKER_ADDRESSES={"broker-z": port.address}), kind)

        assert outcome.status is SendStatus.MISCONFIGURED
        assert "broker-a" in outcome.reason
        assert "BROKER_ADDRESSES" in outcome.reason

    def test_is_surely_not_stored_when_name_servers_name_its_broker_no_more(
        self, port: PortStub, broker: Broker, kind: TopicType
    ):
        """So they do with one that is away; and tell of it when it is back."""
        port.say(ROUTE_OF_TOPIC, 17, "No topic route info")

        away = send(broker, kind)
        port.recover()

        assert away.status is UNAVAILABLE
        assert send(broker, kind).status is ACCEPTED

    def test_gives_up_a_message_that_the_broker_refuses(self, port: PortStub, open_here: OpenHere, kind: TopicType):
        port.say(SEND, 13, "the message is illegal")

        assert send(open_here(), kind).status is SendStatus.REFUSED

    def test_is_another_half_message_or_the_same_message_the_next_time(self, port: PortStub, broker: Broker, kind: TopicType):
        port.say(SEND, 10, does=True, times=1)
        send(broker, kind)
        send(broker, kind)

        first, second = (one.properties["UNIQ_KEY"] for one in port.log.messages.values())
        assert (first != second) is (kind is HALF)


class TestFlowControl:
    @pytest.mark.parametrize("code", [2, 215])
    def test_sends_nothing_for_a_while(self, port: PortStub, open_here: OpenHere, code: int):
        broker = open_here(IN_FLIGHT=1)
        port.say(SEND, code, "period in queue: 216ms")

        outcomes = broker.send_halves([message() for _ in range(50)])

        assert {outcome.status for outcome in outcomes} == {UNAVAILABLE}
        assert len({outcome.reason for outcome in outcomes}) == 1  # so that they stay one batch
        assert len(port.asked(SEND)) == 1

    def test_is_over_after_a_second(self, port: PortStub, broker: Broker):
        port.say(SEND, 2, times=1)
        send(broker)

        wait_until(lambda: send(broker).status is ACCEPTED)

    def test_commits_what_is_stored_all_the_same(self, port: PortStub, broker: Broker):
        half = send(broker)
        port.say(SEND, 2)
        send(broker)

        [end] = broker.end([HalfRef(str(HALF), half.half_id, "m", half.place)], COMMIT)

        assert end.ended is Ended.COMMITTED


class TestSeveralBrokers:
    @pytest.fixture
    def other(self, stub: Stub, port: PortStub) -> Iterator[PortStub]:
        other = PortStub("broker-b")
        port.brokers, stub.brokers = [port, other], [stub, stub]
        yield other
        other.stop()

    @pytest.mark.parametrize("kind", [HALF, NORMAL])
    def test_share_the_messages(self, port: PortStub, other: PortStub, open_here: OpenHere, kind: TopicType):
        broker = open_here(clocks=STANDS_STILL)

        for _ in range(40):
            send(broker, kind)

        assert len(port.log.messages) == len(other.log.messages) == 20

    @pytest.mark.parametrize("code", [1, 2, 16])
    def test_stand_in_for_one_that_is_in_trouble(self, port: PortStub, other: PortStub, open_here: OpenHere, code: int):
        broker = open_here(clocks=STANDS_STILL, IN_FLIGHT=1)
        other.say(SEND, code)

        outcomes = broker.send_halves([message() for _ in range(40)])

        refused = 20 if code == 16 else 1  # a right that is missing is no trouble that passes
        assert [outcome.status for outcome in outcomes].count(ACCEPTED) == 40 - refused
        assert len(other.asked(SEND)) == refused

    def test_stand_in_for_one_that_is_away(self, port: PortStub, other: PortStub, open_here: OpenHere):
        broker = open_here(clocks=STANDS_STILL, IN_FLIGHT=1)
        other.stop()

        outcomes = broker.send_halves([message() for _ in range(40)])

        assert [outcome.status for outcome in outcomes].count(UNAVAILABLE) == 1
        assert len(port.log.messages) == 39

    def test_are_left_alone_where_their_port_is_not_known(self, port: PortStub, other: PortStub, open_here: OpenHere):
        port.brokers = [port]

        outcomes = open_here().send_halves([message() for _ in range(10)])

        assert {outcome.status for outcome in outcomes} == {ACCEPTED}
        assert len(port.log.messages) == 10


class TestSilentConnection:
    def test_is_left_for_a_new_one(self, port: PortStub, open_here: OpenHere):
        wire = Wire(int(port.address.partition(":")[2]))
        broker = open_here(NAME_SERVERS=[], BROKER_ADDRESSES={"broker-a": wire.endpoints}, REQUEST_TIMEOUT=SHORT)
        wait_until(lambda: send(broker).status is ACCEPTED)
        wire.cut()

        outcome = send(broker)

        assert outcome.status is UNSURE
        assert "no answer in 0.3 s" in outcome.reason
        wait_until(lambda: send(broker).status is ACCEPTED)
        wire.close()


class TestProxy:
    """What goes to the port needs the proxy for routes only."""

    def test_that_refuses_sends_and_ends_is_not_asked(self, stub: Stub, port: PortStub, open_here: OpenHere):
        stub.say("SendMessage", Code.INTERNAL_SERVER_ERROR)
        stub.say("EndTransaction", Code.INTERNAL_SERVER_ERROR)
        broker = open_here()
        half = send(broker)

        [end] = broker.end([HalfRef(str(HALF), half.half_id, "m", half.place)], COMMIT)

        assert end.ended is Ended.COMMITTED
        assert len(port.asked(END_TRANSACTION)) == 1
