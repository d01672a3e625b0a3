"""
A proxy that refuses, stalls and fails as it is told: what becomes of messages. Needs no server, but a stub of ours.

Half messages go this way with UNCONFIRMED_ENDS, one-phase messages where they keep an order or no port is known.
"""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from outbox.brokers.base import Broker, Ended, HalfRef, HalfStatus, Outgoing, SendResult, SendStatus
from outbox.brokers.rocketmq.stubs import Code
from outbox.message import COMMIT, TopicType
from tests.outbox.brokers.rocketmq.stub import Stub, Wire
from tests.waiting import wait_until

HALF, NORMAL, FIFO = TopicType.TRANSACTION, TopicType.NORMAL, TopicType.FIFO
SHORT = timedelta(milliseconds=300)

OpenAt = Callable[..., Broker]

# Stored perhaps: flushed or replicated too late, or answered too late.
PERHAPS_STORED = [
    Code.MASTER_PERSISTENCE_TIMEOUT,
    Code.SLAVE_PERSISTENCE_TIMEOUT,
    Code.HA_NOT_AVAILABLE,
    Code.PROXY_TIMEOUT,
    Code.INTERNAL_SERVER_ERROR,
]


def message(kind: TopicType = HALF, **fields: Any) -> Outgoing:
    return Outgoing(**{"message_id": "m", "topic": str(kind), "body": b"{}", **fields})


def send_half(broker: Broker) -> SendResult:
    [outcome] = broker.send_halves([message()])
    return outcome


def ref(outcome: SendResult) -> HalfRef:
    return HalfRef(str(HALF), outcome.half_id, "m")


@pytest.fixture
def open_at(open_at: OpenAt) -> OpenAt:
    """Open brokers that take the proxy's word for an end."""
    return partial(open_at, UNCONFIRMED_ENDS=True)


@pytest.fixture
def broker(open_at: OpenAt, stub: Stub) -> Broker:
    return open_at(stub.endpoints)


class TestHalf:
    @pytest.mark.parametrize("code", PERHAPS_STORED, ids=Code.Name)
    def test_counts_as_stored_only_when_the_server_is_sure(self, stub: Stub, broker: Broker, code: int):
        stub.say("SendMessage", code)

        outcome = send_half(broker)

        assert (outcome.status, outcome.half_id) == (SendStatus.UNSURE, "")
        assert len(stub.sent()) == 1  # nothing is repeated under one id

    def test_is_judged_by_what_is_said_of_itself(self, stub: Stub, open_at: OpenAt):
        stub.say_of_the_message(Code.MASTER_PERSISTENCE_TIMEOUT)

        assert send_half(open_at(stub.endpoints)).status is SendStatus.UNSURE

    def test_is_sent_under_another_id_the_next_time(self, stub: Stub, broker: Broker):
        stub.say("SendMessage", Code.PROXY_TIMEOUT, times=1)

        send_half(broker)
        again = send_half(broker)

        first, second = (one.system_properties.message_id for one in stub.sent())
        assert first != second == again.half_id

    def test_is_unsure_when_no_answer_comes_in_time(self, stub: Stub, open_at: OpenAt):
        broker = open_at(stub.endpoints, REQUEST_TIMEOUT=SHORT)
        stub.freeze("SendMessage")

        outcome = send_half(broker)

        assert outcome.status is SendStatus.UNSURE
        assert "DEADLINE_EXCEEDED" in outcome.reason

    def test_is_unsure_when_the_connection_breaks_before_the_answer(self, stub: Stub, open_at: OpenAt):
        stub.brokers = [wire := Wire(stub.port)]
        broker = open_at(wire.endpoints)
        send_half(broker)
        stub.freeze("SendMessage", then=wire.close)

        outcome = send_half(broker)

        assert outcome.status is SendStatus.UNSURE

    @pytest.mark.parametrize("code", [Code.UNAUTHORIZED, Code.FORBIDDEN], ids=Code.Name)
    def test_waits_for_a_person_when_credentials_are_refused(self, stub: Stub, open_at: OpenAt, code: int):
        broker = open_at(stub.endpoints, ACCESS_KEY="me", SECRET_KEY="not it")
        stub.say("QueryRoute", code, "signature does not match")

        outcome = send_half(broker)

        assert outcome.status is SendStatus.MISCONFIGURED
        assert outcome.reason == f"RocketMQ says {code} signature does not match."

    def test_waits_for_a_person_when_something_else_listens_there(self, stub: Stub, broker: Broker):
        stub.fail("QueryRoute", grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

        assert send_half(broker).status is SendStatus.MISCONFIGURED


class TestEnd:
    def test_is_known_in_the_process_that_sent_it_alone_and_once(self, stub: Stub, open_at: OpenAt, broker: Broker):
        half = ref(send_half(broker))

        ended = [one.end([half], COMMIT)[0].ended for one in (open_at(stub.endpoints), broker, broker)]

        assert ended == [Ended.NOT_FOUND, Ended.COMMITTED, Ended.NOT_FOUND]
        assert len(stub.asked("EndTransaction")) == 1

    @pytest.mark.parametrize(
        ("code", "status", "ended"),
        [
            (Code.INTERNAL_SERVER_ERROR, SendStatus.ACCEPTED, Ended.NOT_FOUND),  # the check-back has the word
            (Code.PROXY_TIMEOUT, SendStatus.UNSURE, None),
            (Code.UNAUTHORIZED, SendStatus.UNSURE, None),
        ],
    )
    def test_is_not_repeated_whatever_the_proxy_answers(
        self, stub: Stub, broker: Broker, code: int, status: SendStatus, ended: Ended | None
    ):
        half = ref(send_half(broker))
        stub.say("EndTransaction", code)

        [outcome] = broker.end([half], COMMIT)

        assert (outcome.status, outcome.ended) == (status, ended)
        assert str(code) in outcome.reason
        assert len(stub.asked("EndTransaction")) == 1

    def test_does_not_leave_when_its_time_is_over(self, stub: Stub, open_at: OpenAt):
        clocks = {"clock": lambda: float(len(stub.asked("EndTransaction")))}  # each takes a second
        broker = open_at(stub.endpoints, clocks=clocks, IN_FLIGHT=1)
        halves = [ref(send_half(broker)) for _ in range(4)]

        outcomes = broker.end(halves, COMMIT, within=timedelta(seconds=2))

        assert [one.status for one in outcomes] == [SendStatus.ACCEPTED] * 2 + [SendStatus.UNAVAILABLE] * 2
        assert len(stub.asked("EndTransaction")) == 2

    def test_without_an_answer_is_for_the_check_back_until_it_asks_no_more(self, stub: Stub, open_at: OpenAt):
        broker = open_at(stub.endpoints, CHECK_HORIZON=timedelta(minutes=10))
        half, now = ref(send_half(broker)), datetime.now(UTC)

        standings = broker.look_up_halves(
            [replace(half, decided_at=at) for at in (None, now - timedelta(minutes=9), now - timedelta(minutes=11))]
        )

        assert standings == [HalfStatus.UNKNOWN, HalfStatus.UNKNOWN, HalfStatus.GONE]


class TestTopic:
    def test_that_was_there_is_away_where_the_proxy_says_that_it_is_missing(self, stub: Stub, broker: Broker):
        broker.send([message(FIFO, key="1")])
        stub.say("SendMessage", Code.TOPIC_NOT_FOUND)

        [outcome] = broker.send([message(FIFO, key="1")])

        assert outcome.status is SendStatus.UNAVAILABLE
        assert "its brokers may be down" in outcome.reason


class TestFlowControl:
    def test_sends_nothing_for_a_while(self, stub: Stub, open_at: OpenAt):
        broker = open_at(stub.endpoints, IN_FLIGHT=1)
        stub.say("SendMessage", Code.TOO_MANY_REQUESTS, "flow control, 216ms")

        outcomes = broker.send_halves([message() for _ in range(50)])

        assert {outcome.status for outcome in outcomes} == {SendStatus.UNAVAILABLE}
        assert len({outcome.reason for outcome in outcomes}) == 1  # so that they stay one batch
        assert len(stub.sent()) == 1

    def test_is_over_after_a_second(self, stub: Stub, broker: Broker):
        stub.say("SendMessage", Code.TOO_MANY_REQUESTS, times=1)
        began = time.monotonic()
        send_half(broker)

        wait_until(lambda: send_half(broker).status is SendStatus.ACCEPTED)

        assert time.monotonic() - began > 0.7

    def test_commits_what_is_stored_all_the_same(self, stub: Stub, broker: Broker):
        half = send_half(broker)
        stub.say("SendMessage", Code.TOO_MANY_REQUESTS)
        send_half(broker)

        assert [one.ended for one in broker.end([ref(half)], COMMIT)] == [Ended.COMMITTED]


class TestSeveralProxies:
    @pytest.fixture
    def other(self, stub: Stub) -> Iterator[Stub]:
        other = Stub()
        stub.brokers.append(other)
        yield other
        other.stop()

    def test_share_the_messages(self, stub: Stub, other: Stub, open_at: OpenAt):
        broker = open_at(stub.endpoints, clocks={"clock": lambda: 100.0})  # none is slow, and left alone for it

        broker.send([message(NORMAL) for _ in range(40)])

        assert len(stub.sent()) == len(other.sent()) == 20

    @pytest.mark.parametrize("code", [Code.PROXY_TIMEOUT, Code.TOO_MANY_REQUESTS], ids=Code.Name)
    def test_stand_in_for_one_that_is_in_trouble(self, stub: Stub, other: Stub, open_at: OpenAt, code: int):
        stands_still = {"clock": lambda: 100.0}  # trouble does not pass meanwhile, and none is slow
        broker = open_at(stub.endpoints, clocks=stands_still, IN_FLIGHT=1)
        other.say("SendMessage", code)

        outcomes = broker.send([message(NORMAL) for _ in range(40)])

        assert [outcome.status for outcome in outcomes].count(SendStatus.ACCEPTED) == 39
        assert len(other.sent()) == 1

    def test_do_not_stand_in_for_the_one_that_keeps_a_keys_order(self, other: Stub, broker: Broker):
        keys = [f"key-{number}" for number in range(20)]
        broker.send([message(FIFO, key=key) for key in keys])
        others = {one.system_properties.message_group for one in other.sent()}
        other.fail("SendMessage", grpc.StatusCode.UNAVAILABLE, "Socket closed")

        outcomes = broker.send([message(FIFO, key=key) for key in keys])

        failed = {key for key, outcome in zip(keys, outcomes, strict=True) if outcome.status is not SendStatus.ACCEPTED}
        assert failed == others != set()

    def test_go_on_when_the_one_that_settings_name_is_away(self, stub: Stub, other: Stub, open_at: OpenAt):
        broker = open_at(stub.endpoints, IN_FLIGHT=1)
        broker.send([message(NORMAL)])
        stub.stop()

        broker.send([message(NORMAL) for _ in range(4)])

        assert [one.status for one in broker.send([message(NORMAL)] * 10)] == [SendStatus.ACCEPTED] * 10


class TestSilentConnection:
    def test_is_left_for_a_new_one(self, stub: Stub, open_at: OpenAt):
        stub.brokers = [wire := Wire(stub.port)]
        broker = open_at(wire.endpoints, REQUEST_TIMEOUT=SHORT)
        wait_until(lambda: send_half(broker).status is SendStatus.ACCEPTED)
        wire.cut()

        verdict = send_half(broker).status

        assert verdict is SendStatus.UNSURE
        wait_until(lambda: send_half(broker).status is SendStatus.ACCEPTED)
        wire.close()
