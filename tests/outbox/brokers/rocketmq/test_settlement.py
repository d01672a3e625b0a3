"""What a slow handler and a hand-back come to at a real server, behind its own proxy and behind one of its own."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from outbox.brokers.base import Broker, Delivery
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.message import TopicType
from project.servers.rocketmq import RocketMQ
from project.servers.rocketmq_proxy import ClusterProxy
from tests.contracts.acts import HELD, INVISIBLE, Acts
from tests.contracts.rocketmq import RocketMQHarness
from tests.outbox.brokers.rocketmq.standing import errors_of
from tests.rocketmq_node import PROXY
from tests.waiting import wait_until

NORMAL, FIFO = TopicType.NORMAL, TopicType.FIFO
KINDS = [NORMAL, FIFO]

RETRIES = 5  # of a group that the server gives up on soon

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", KINDS)]


@pytest.fixture(scope="module")
def cluster_proxy() -> Iterator[ClusterProxy]:
    from tests.rocketmq_node import server

    proxy = ClusterProxy(server(), dict(PROXY)).start()
    yield proxy
    proxy.kill()


@pytest.fixture(params=["local", "cluster"])
def broker(request: pytest.FixtureRequest, harness: RocketMQHarness, server: RocketMQ) -> RocketMQBroker:
    if request.param == "local":
        return harness.open()
    broker = harness.open(ENDPOINTS=request.getfixturevalue("cluster_proxy").endpoints)
    wait_until(lambda: not errors_of(broker), 120)
    return broker


@pytest.fixture
def hasty(server: RocketMQ) -> str:
    """A group that the server gives up on soon."""
    server.make_group("hasty", retries=RETRIES)
    server.make_group("hasty_fifo", is_ordered=True, retries=RETRIES)
    return "hasty"


def held_while(broker: Broker, delivery: Delivery, act: Callable[[], object]) -> Delivery:
    """Renew a delivery from another thread until an act is over; return it as it is named then."""
    over = threading.Event()
    newest = [delivery]

    def renew() -> None:
        while not over.wait((INVISIBLE / 60).total_seconds()):
            [held] = broker.renew(newest, INVISIBLE)
            assert held is not None
            newest[:] = [held]

    with_it = threading.Thread(target=renew)
    with_it.start()
    try:
        act()
    finally:
        over.set()
        with_it.join()
    return newest[0]


class TestASlowHandler:
    def test_whose_delivery_is_renewed_is_the_only_one(
        self, harness: RocketMQHarness, acts: Acts, broker: Broker, kind: TopicType
    ):
        acts.send_bodies(b"slow", kind=kind, key="a")
        [delivery] = acts.receive(kind, hold=INVISIBLE, count=1)
        others: list[Delivery] = []
        other = harness.open()

        def handle() -> None:
            until = harness.age() + 3 * INVISIBLE
            while harness.age() < until:
                others.extend(acts.receive(kind, broker=other))

        newest = held_while(broker, delivery, handle)

        assert broker.ack([newest]) == [True]
        harness.pass_time(2 * INVISIBLE)
        assert others == acts.receive(kind) == acts.receive(kind, broker=other) == []

    def test_holds_its_delivery_while_its_thread_receives_more(
        self, harness: RocketMQHarness, acts: Acts, broker: Broker, kind: TopicType
    ):
        acts.send_bodies(b"slow", kind=kind, key="a")
        [delivery] = acts.receive(kind, hold=INVISIBLE, count=1)
        more: list[Delivery] = []

        newest = held_while(broker, delivery, lambda: more.extend(acts.receive(kind, wait=INVISIBLE / 10)))

        assert more == []
        assert broker.ack([newest]) == [True]


class TestRelease:
    def test_hands_a_message_to_others_at_once(self, harness: RocketMQHarness, acts: Acts, broker: Broker, kind: TopicType):
        acts.send_bodies(b"a", kind=kind, key="a")
        deliveries = acts.receive(kind, hold=HELD, count=1)

        broker.release(deliveries)

        [again] = acts.receive(kind, count=1, broker=harness.open())
        assert (again.body, again.delivery_count) == (b"a", 2)

    def test_counts_one_towards_the_servers_limit_and_renewals_count_nothing(
        self, acts: Acts, broker: Broker, kind: TopicType, hasty: str
    ):
        acts.send_bodies(b"a", b"b", kind=kind, key="a")
        attempts = []

        while True:
            [delivery] = acts.receive(kind, group=hasty, limit=1, count=1)
            if delivery.body == b"b":
                broker.ack([delivery])
                continue
            attempts.append(delivery.delivery_count)
            for _ in range(RETRIES * 2):
                [held] = broker.renew([delivery], HELD)
                assert held is not None
                delivery = held
            broker.release([delivery])
            if len(attempts) > RETRIES:
                break

        assert attempts == list(range(1, RETRIES + 2))
        more: list[Delivery] = []
        topic = acts.harness.topic(kind)
        [given_up] = wait_until(
            lambda: more.extend(acts.receive(kind, group=hasty)) or broker.receive_dead_letters(hasty, [topic], limit=10), 60
        )
        assert [delivery.body for delivery in more if delivery.body == b"a"] == []
        assert given_up.body == b"a"
        broker.ack([given_up])


class TestTimesThatTheServerRefuses:
    """Asked for past the harness, which would take minutes for seconds."""

    @pytest.mark.parametrize("span", [timedelta(days=3), timedelta.max], ids=["days", "max"])
    def test_hide_a_message_for_as_long_as_it_can(self, acts: Acts, broker: RocketMQBroker, kind: TopicType, span: timedelta):
        acts.send_bodies(b"a", kind=kind, key="a")
        [delivery] = acts.receive(kind, hold=HELD, count=1)

        [held] = RocketMQBroker.renew(broker, [delivery], span)

        assert held is not None
        assert acts.receive(kind) == []

    @pytest.mark.parametrize("span", [timedelta(), -timedelta(seconds=1), timedelta.min], ids=["zero", "negative", "min"])
    def test_bring_a_message_back_at_once(self, acts: Acts, broker: RocketMQBroker, kind: TopicType, span: timedelta):
        acts.send_bodies(b"a", kind=kind, key="a")
        [delivery] = acts.receive(kind, hold=HELD, count=1)

        assert RocketMQBroker.renew(broker, [delivery], span) != [None]

        assert [again.delivery_count for again in acts.receive_again(kind)] == [2]
