"""A relay and the answers of brokers and proxies that are in trouble. Needs no server, but stubs of ours."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from outbox import database
from outbox.brokers.base import Broker
from outbox.brokers.rocketmq.remoting.requests import COMMIT_TYPE, END_TRANSACTION, SEND_MESSAGE_V2
from outbox.brokers.rocketmq.stubs import Code
from outbox.models import Batch, DeadMessage, State
from outbox.relay.rounds import Relay
from tests.factories import TicketFactory, TopicFactory
from tests.outbox.brokers.rocketmq.port_stub import PortStub
from tests.outbox.brokers.rocketmq.stub import Stub
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db

OpenAt = Callable[..., Broker]

SEND, END = SEND_MESSAGE_V2, END_TRANSACTION


@pytest.fixture
def relay(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Relay:
    """A relay with five messages, which retries at once."""
    monkeypatch.setattr("outbox.relay.rounds.RETRY_BASE", timedelta(0))
    TicketFactory.create_batch(5, topic=TopicFactory(name="transaction", type="transaction"))
    return Relay(database.raw("default"), broker, 1)


def released() -> Batch:
    """Return the batch, which is released without a try that counts."""
    batch = Batch.objects.get()
    assert (batch.state, batch.failures) == (State.RELEASED, 0)
    assert not DeadMessage.objects.exists()
    return batch


def are_decided_but_one() -> bool:
    batch = Batch.objects.get()
    return (batch.state, len(batch.open)) == (State.PREPARED, 1)


class TestAtThePort:
    @pytest.fixture
    def broker(self, port: PortStub, open_here: OpenAt) -> Broker:
        return open_here()

    @pytest.mark.parametrize("code", [2, 215, 16, 17, 3])
    def test_keeps_messages_and_counts_no_try(self, port: PortStub, relay: Relay, code: int):
        port.say(SEND, code, "no")

        relay.step()

        assert released()

    def test_commits_nothing_that_is_perhaps_stored_and_sends_it_again(self, port: PortStub, relay: Relay):
        port.say(SEND, 10, "flushed too late", does=True, times=5)

        relay.step()
        before = list(port.log.ends)
        wait_until(lambda: relay.step().sent == 5)

        assert before == []
        stored = [one.properties for one in port.log.of("RMQ_SYS_TRANS_HALF_TOPIC")]
        assert len({one["ce-token"] for one in stored}) == len(stored) == 10
        assert {one.half_id for one in port.log.ends} == {one["UNIQ_KEY"] for one in stored[5:]}

    def test_keeps_messages_while_nobody_is_there(self, port: PortStub, relay: Relay):
        port.stop()

        relay.drain()

        assert released()

    def test_opens_its_breaker_while_the_server_has_no_time(self, port: PortStub, relay: Relay):
        port.say(SEND, 2)

        relay.drain()

        assert relay.breakers.failed_topics
        assert Batch.objects.get().failures == 0

    @pytest.mark.parametrize("code", [2, 1])
    def test_leaves_a_commit_that_is_not_confirmed_decided_and_repeats_nothing(self, port: PortStub, relay: Relay, code: int):
        port.say(END, code, "not now", times=1)

        relay.step()
        relay.sweep()

        assert are_decided_but_one()
        assert len(port.asked(END)) == 5
        assert {one.kind for one in port.log.ends} == {COMMIT_TYPE}


class TestAtTheProxy:
    @pytest.fixture
    def broker(self, stub: Stub, open_at: OpenAt) -> Broker:
        return open_at(stub.endpoints, UNCONFIRMED_ENDS=True)

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
    def test_keeps_messages_and_counts_no_try(self, stub: Stub, relay: Relay, name: str, code: int):
        stub.say(name, code, "no")

        relay.step()

        assert str(code) in released().last_error

    @pytest.mark.parametrize("code", [Code.MASTER_PERSISTENCE_TIMEOUT, Code.PROXY_TIMEOUT], ids=Code.Name)
    def test_commits_nothing_that_is_perhaps_stored_and_sends_it_again(self, stub: Stub, relay: Relay, code: int):
        stub.say("SendMessage", code, times=5)

        relay.step()
        before = stub.asked("EndTransaction")
        wait_until(lambda: relay.step().sent == 5)

        assert before == []
        tokens = {one.user_properties["ce-token"] for one in stub.sent()}
        assert len(tokens) == len(stub.sent()) == 10
        ended = {request.message_id for request in stub.asked("EndTransaction")}
        assert ended == {one.system_properties.message_id for one in stub.sent()[5:]}

    def test_leaves_a_commit_that_the_proxy_does_not_know_to_the_check_back(self, stub: Stub, relay: Relay):
        stub.say("EndTransaction", Code.INTERNAL_SERVER_ERROR, "cannot found transaction data", times=1)

        relay.step()
        relay.sweep()

        assert are_decided_but_one()
        assert len(stub.asked("EndTransaction")) == 5
