"""A proxy that refuses, stalls and fails as it is told: what becomes of messages. Needs no server, but a stub of ours."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from outbox import conf, database
from outbox.brokers.base import Broker, Delivery, Ended, HalfRef, Outgoing, SendResult, SendStatus
from outbox.brokers.rocketmq.stubs import Code, definition
from outbox.errors import BrokerUnavailable
from outbox.message import COMMIT, TopicType
from outbox.models import Batch, DeadMessage, State
from outbox.relay.lane import Lane
from outbox.relay.rounds import Relay
from tests.factories import TicketFactory, TopicFactory
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


class TestHalf:
    @pytest.mark.parametrize("code", PERHAPS_STORED, ids=Code.Name)
    def test_counts_as_stored_only_when_the_server_is_sure(self, stub: Stub, open_at: OpenAt, code: int):
        broker = open_at(stub.endpoints)
        stub.say("SendMessage", code)

        outcome = send_half(broker)

        assert (outcome.status, outcome.half_id) == (SendStatus.UNSURE, "")
        assert len(stub.sent()) == 1  # nothing is repeated under one id

    def test_is_judged_by_what_is_said_of_itself(self, stub: Stub, open_at: OpenAt):
        stub.say_of_the_message(Code.MASTER_PERSISTENCE_TIMEOUT)

        assert send_half(open_at(stub.endpoints)).status is SendStatus.UNSURE

    def test_is_sent_under_another_id_the_next_time(self, stub: Stub, open_at: OpenAt):
        broker = open_at(stub.endpoints)
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

    def test_waits_for_a_person_when_something_else_listens_there(self, stub: Stub, open_at: OpenAt):
        broker = open_at(stub.endpoints)
        stub.fail("QueryRoute", grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

        assert send_half(broker).status is SendStatus.MISCONFIGURED


class TestWindow:
    def test_sends_no_half_that_could_not_be_committed_in_time(self, stub: Stub, open_at: OpenAt):
        clocks = {"clock": lambda: len(stub.sent())}  # each takes a second
        broker = open_at(stub.endpoints, clocks=clocks, COMMIT_WINDOW=timedelta(seconds=10), IN_FLIGHT=1)

        statuses = [outcome.status for outcome in broker.send_halves([message() for _ in range(20)])]

        assert statuses == [SendStatus.ACCEPTED] * 5 + [SendStatus.UNAVAILABLE] * 15
        assert len(stub.sent()) == 5


class TestSignature:
    def test_is_that_of_the_time(self, stub: Stub, open_at: OpenAt):
        send_half(open_at(stub.endpoints, ACCESS_KEY="me", SECRET_KEY="secret", NAMESPACE="ours"))

        said = stub.metadata[-1]
        assert said["authorization"].startswith("MQv2-HMAC-SHA1 Credential=me, SignedHeaders=x-mq-date-time, Signature=")
        assert said["x-mq-namespace"] == "ours"

    def test_is_left_out_without_a_key(self, stub: Stub, open_at: OpenAt):
        send_half(open_at(stub.endpoints))

        assert "authorization" not in stub.metadata[-1]


class TestTls:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> Path:
        """Make a certificate that vouches for itself; its key lies beside it."""
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
        kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
        subprocess.run(["openssl", "req", "-x509", *kind, *files, *names], check=True, capture_output=True)
        return tmp_path / "cert.pem"

    @pytest.fixture
    def safe(self, authority: Path) -> Iterator[Stub]:
        safe = Stub(certificate=authority)
        yield safe
        safe.stop()

    def test_takes_a_proxy_that_the_file_vouches_for(self, safe: Stub, open_at: OpenAt, authority: Path):
        broker = open_at(safe.endpoints, TLS=True, TLS_CA_FILE=str(authority))

        assert send_half(broker).status is SendStatus.ACCEPTED

    @pytest.mark.parametrize("options", [{"TLS": True}, {}], ids=str)
    def test_sends_nothing_to_a_stranger_and_nothing_in_the_clear(self, safe: Stub, open_at: OpenAt, options: dict[str, bool]):
        outcome = send_half(open_at(safe.endpoints, **options))

        assert outcome.status is not SendStatus.ACCEPTED
        assert safe.requests == []


class TestFlowControl:
    def test_sends_nothing_for_a_while(self, stub: Stub, open_at: OpenAt):
        broker = open_at(stub.endpoints, IN_FLIGHT=1)
        stub.say("SendMessage", Code.TOO_MANY_REQUESTS, "flow control, 216ms")

        outcomes = broker.send_halves([message() for _ in range(50)])

        assert {outcome.status for outcome in outcomes} == {SendStatus.UNAVAILABLE}
        assert len({outcome.reason for outcome in outcomes}) == 1  # so that they stay one batch
        assert len(stub.sent()) == 1

    def test_is_over_after_a_second(self, stub: Stub, open_at: OpenAt):
        broker = open_at(stub.endpoints)
        stub.say("SendMessage", Code.TOO_MANY_REQUESTS, times=1)
        began = time.monotonic()
        send_half(broker)

        wait_until(lambda: send_half(broker).status is SendStatus.ACCEPTED)

        assert time.monotonic() - began > 0.7

    def test_commits_what_is_stored_all_the_same(self, stub: Stub, open_at: OpenAt):
        broker = open_at(stub.endpoints)
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

    def test_do_not_stand_in_for_the_one_that_keeps_a_keys_order(self, stub: Stub, other: Stub, open_at: OpenAt):
        broker = open_at(stub.endpoints)
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


class TestClock:
    """Ten seconds off, by the wall; the window is measured by a clock that nobody sets."""

    @pytest.fixture
    def seconds(self) -> list[float]:
        return [100.0]

    def broker(self, stub: Stub, open_at: OpenAt, seconds: list[float], off: float) -> Broker:
        return open_at(stub.endpoints, clocks={"clock": lambda: seconds[0], "now": lambda: time.time() + off})

    @pytest.mark.parametrize("off", [-10, 10])
    def test_does_not_move_the_window(self, stub: Stub, open_at: OpenAt, seconds: list[float], off: float):
        broker = self.broker(stub, open_at, seconds, off)
        half = send_half(broker)
        seconds[0] += 1.9

        assert [one.ended for one in broker.end([ref(half)], COMMIT)] == [Ended.COMMITTED]

    def test_sends_no_commit_behind_the_window(self, stub: Stub, open_at: OpenAt, seconds: list[float]):
        broker = self.broker(stub, open_at, seconds, off=0)
        half = send_half(broker)
        seconds[0] += 2.1

        [outcome] = broker.end([ref(half)], COMMIT)

        assert outcome.status is SendStatus.UNSURE
        assert stub.asked("EndTransaction") == []

    @pytest.mark.parametrize("off", [-10, 10])
    def test_is_said_when_the_server_refuses_signatures_for_it(self, stub: Stub, open_at: OpenAt, off: float):
        stub.insist_on_time(seconds=5)
        clocks = {"now": lambda: time.time() + off}
        broker = open_at(stub.endpoints, clocks=clocks, ACCESS_KEY="me", SECRET_KEY="secret")

        outcome = send_half(broker)

        assert outcome.status is SendStatus.MISCONFIGURED
        assert "time" in outcome.reason


@pytest.mark.django_db
class TestRelay:
    @pytest.fixture
    def connection(self) -> database.Connection:
        return database.raw("default")

    def relay(self, connection: database.Connection, broker: Broker) -> Relay:
        TicketFactory.create_batch(5, topic=TopicFactory(name=str(HALF), type="transaction"))
        return Relay(connection, broker, Lane(1), settings=conf.RelaySettings(retry_base=timedelta(0)))

    @pytest.mark.parametrize(
        ("name", "code"),
        [
            ("QueryRoute", Code.UNAUTHORIZED),
            ("SendMessage", Code.UNAUTHORIZED),
            ("QueryRoute", Code.TOPIC_NOT_FOUND),
            ("SendMessage", Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
            ("SendMessage", Code.TOO_MANY_REQUESTS),
        ],
    )
    def test_keeps_messages_and_counts_no_try(
        self, stub: Stub, open_at: OpenAt, connection: database.Connection, name: str, code: int
    ):
        relay = self.relay(connection, open_at(stub.endpoints))
        stub.say(name, code, "no")

        relay.step()

        [batch] = Batch.objects.all()
        assert (batch.state, batch.tries) == (State.RELEASED, 0)
        assert str(code) in batch.last_error
        assert not DeadMessage.objects.exists()

    @pytest.mark.parametrize("code", PERHAPS_STORED, ids=Code.Name)
    def test_commits_nothing_that_is_perhaps_stored_and_sends_it_again(
        self, stub: Stub, open_at: OpenAt, connection: database.Connection, code: int
    ):
        relay = self.relay(connection, open_at(stub.endpoints))
        stub.say("SendMessage", code, times=5)

        relay.step()
        before = [request.resolution for request in stub.asked("EndTransaction")]
        wait_until(lambda: relay.step().sent == 5)

        assert before == []
        tokens = [one.user_properties["ce-token"] for one in stub.sent()]
        assert len(tokens) == len(set(tokens)) == 10
        ended = {request.message_id for request in stub.asked("EndTransaction")}
        assert ended == {one.system_properties.message_id for one in stub.sent()[5:]}

    def test_keeps_messages_while_nobody_is_there(self, open_at: OpenAt, connection: database.Connection):
        relay = self.relay(connection, open_at("127.0.0.1:1"))

        relay.drain()

        [batch] = Batch.objects.all()
        assert (batch.state, batch.tries) == (State.RELEASED, 0)

    def test_opens_its_breaker_while_the_server_has_no_time(self, stub: Stub, open_at: OpenAt, connection: database.Connection):
        relay = self.relay(connection, open_at(stub.endpoints))
        stub.say("SendMessage", Code.TOO_MANY_REQUESTS)

        relay.drain(at_most=timedelta(seconds=5))

        assert relay.breaker.seconds_left > 0
        assert Batch.objects.get().tries == 0

    def test_leaves_a_commit_without_an_answer_to_the_check_back(
        self, stub: Stub, open_at: OpenAt, connection: database.Connection
    ):
        relay = self.relay(connection, open_at(stub.endpoints))
        stub.say("EndTransaction", Code.INTERNAL_SERVER_ERROR, "cannot found transaction data", times=1)

        relay.step()
        relay.sweep()

        batch = Batch.objects.get()
        assert (batch.state, len(batch.open)) == (State.PREPARED, 1)
        assert len(stub.asked("EndTransaction")) == 5
        assert {request.resolution for request in stub.asked("EndTransaction")} == {definition.TransactionResolution.COMMIT}


class TestRenewals:
    @pytest.fixture
    def broker(self, stub: Stub, open_at: OpenAt) -> Broker:
        return open_at(stub.endpoints)

    @pytest.fixture
    def held(self) -> list[Delivery]:
        topic = message(NORMAL).topic
        return [Delivery("group", topic, f"m{number}", b"x", receipt=f"r{number}") for number in range(2)]

    def test_keep_the_receipts_of_those_that_the_server_answered(self, stub: Stub, broker: Broker, held: list[Delivery]):
        """An answer that is lost leaves its delivery as it was; the other's old receipt is good for nothing any more."""
        stub.fail("ChangeInvisibleDuration", grpc.StatusCode.UNAVAILABLE, times=1)

        renewed = broker.renew(held, timedelta(seconds=30))

        receipts = [one.receipt for one in renewed if one is not None]
        assert sorted(receipt.startswith("renewed") for receipt in receipts) == [False, True]

    def test_raise_where_the_server_answered_none(self, stub: Stub, broker: Broker, held: list[Delivery]):
        stub.fail("ChangeInvisibleDuration", grpc.StatusCode.UNAVAILABLE)

        with pytest.raises(BrokerUnavailable):
            broker.renew(held, timedelta(seconds=30))
