"""One-phase sends: which way they go, and the time that a batch may take. Needs no server, but stubs of ours."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from outbox.brokers.base import Broker, Outgoing, SendStatus
from outbox.brokers.rocketmq.remoting.requests import SEND_MESSAGE_V2
from outbox.brokers.rocketmq.sender import SEND_SECONDS
from outbox.message import TopicType
from tests.outbox.brokers.rocketmq.port_stub import PortStub
from tests.outbox.brokers.rocketmq.stub import Stub

OpenAt = Callable[..., Broker]

NORMAL, FIFO, DELAY = TopicType.NORMAL, TopicType.FIFO, TopicType.DELAY


def messages(kind: TopicType, count: int = 1) -> list[Outgoing]:
    due_at = datetime.now(UTC) if kind is DELAY else None
    return [Outgoing(str(number), str(kind), b"1", key="4711", deliver_at=due_at) for number in range(count)]


class TestWay:
    def test_is_a_brokers_own_port_where_no_order_is_kept(self, stub: Stub, port: PortStub, open_here: OpenAt):
        outcomes = open_here().send(messages(NORMAL, 3))

        assert [one.status for one in outcomes] == [SendStatus.ACCEPTED] * 3
        assert sorted(one.properties["UNIQ_KEY"] for one in port.log.of("normal")) == ["0", "1", "2"]
        assert stub.sent() == []

    @pytest.mark.parametrize("kind", [FIFO, DELAY])
    def test_is_the_proxy_for_other_types(self, stub: Stub, port: PortStub, open_here: OpenAt, kind: TopicType):
        open_here().send(messages(kind))

        assert len(stub.sent()) == 1
        assert port.asked(SEND_MESSAGE_V2) == []

    def test_is_the_proxy_where_no_port_is_known(self, stub: Stub, open_at: OpenAt):
        open_at(stub.endpoints).send(messages(NORMAL))

        assert len(stub.sent()) == 1


class TestBatch:
    """No message of a batch is begun when it has taken too long: the relay's lease must outlast it."""

    @pytest.mark.parametrize("kind", [NORMAL, FIFO])
    def test_begins_no_message_when_it_has_taken_too_long(self, stub: Stub, port: PortStub, open_here: OpenAt, kind: TopicType):
        def clock() -> float:
            return SEND_SECONDS * 0.6 * (len(stub.sent()) + len(port.asked(SEND_MESSAGE_V2)))

        outcomes = open_here(clocks={"clock": clock}, IN_FLIGHT=1).send(messages(kind, 4))

        assert [one.status for one in outcomes] == [SendStatus.ACCEPTED] * 2 + [SendStatus.UNAVAILABLE] * 2
        assert "took too long" in outcomes[2].reason

    @pytest.mark.parametrize("options", [{}, {"UNCONFIRMED_ENDS": True}], ids=str)
    def test_begins_no_half_message_when_it_has_taken_too_long(
        self, stub: Stub, port: PortStub, open_here: OpenAt, options: dict[str, bool]
    ):
        def clock() -> float:
            return SEND_SECONDS * 0.6 * (len(stub.sent()) + len(port.asked(SEND_MESSAGE_V2)))

        broker = open_here(clocks={"clock": clock}, IN_FLIGHT=1, **options)
        outcomes = broker.send_halves(messages(TopicType.TRANSACTION, 4))

        assert [one.status for one in outcomes] == [SendStatus.ACCEPTED] * 2 + [SendStatus.UNAVAILABLE] * 2
