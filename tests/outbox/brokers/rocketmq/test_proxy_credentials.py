"""Signatures and certificates at a proxy. Needs no server, but a stub of ours."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outbox.brokers.base import Broker, Outgoing, SendResult, SendStatus
from tests.outbox.brokers.rocketmq.certificates import make_certificate
from tests.outbox.brokers.rocketmq.stub import Stub

OpenAt = Callable[..., Broker]


def send_one(broker: Broker) -> SendResult:
    [outcome] = broker.send([Outgoing("m", "normal", b"{}")])
    return outcome


class TestSignature:
    def test_is_that_of_the_time(self, stub: Stub, open_at: OpenAt):
        send_one(open_at(stub.endpoints, ACCESS_KEY="me", SECRET_KEY="secret", NAMESPACE="ours"))

        said = stub.metadata[-1]
        assert said["authorization"].startswith("MQv2-HMAC-SHA1 Credential=me, SignedHeaders=x-mq-date-time, Signature=")
        assert said["x-mq-namespace"] == "ours"

    def test_is_left_out_without_a_key(self, stub: Stub, open_at: OpenAt):
        send_one(open_at(stub.endpoints))

        assert "authorization" not in stub.metadata[-1]


class TestTls:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> Path:
        return make_certificate(tmp_path)

    @pytest.fixture
    def safe(self, authority: Path) -> Iterator[Stub]:
        safe = Stub(certificate=authority)
        yield safe
        safe.stop()

    def test_takes_a_proxy_that_the_file_vouches_for(self, safe: Stub, open_at: OpenAt, authority: Path):
        broker = open_at(safe.endpoints, TLS=True, TLS_CA_FILE=str(authority))

        assert send_one(broker).status is SendStatus.ACCEPTED

    @pytest.mark.parametrize("options", [{"TLS": True}, {}], ids=str)
    def test_sends_nothing_to_a_stranger_and_nothing_in_the_clear(self, safe: Stub, open_at: OpenAt, options: dict[str, bool]):
        outcome = send_one(open_at(safe.endpoints, **options))

        assert outcome.status is not SendStatus.ACCEPTED
        assert safe.requests == []


class TestClock:
    @pytest.mark.parametrize("off", [-10, 10])
    def test_is_said_to_be_off_when_the_server_refuses_signatures_for_it(self, stub: Stub, open_at: OpenAt, off: float):
        stub.insist_on_time(seconds=5)
        clocks = {"now": lambda: time.time() + off}
        broker = open_at(stub.endpoints, clocks=clocks, ACCESS_KEY="me", SECRET_KEY="secret")

        outcome = send_one(broker)

        assert outcome.status is SendStatus.MISCONFIGURED
        assert "time" in outcome.reason
