"""
A broker killed while half messages are committed: what a relay marks SENT is never lost, and all else is sent in the end.

`make faults-rocketmq` plays it 100 times, behind a proxy of its own and behind one in the broker's process.
"""

import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outbox.message import TopicType
from outbox.models import Batch, Topic
from project.servers.rocketmq import RocketMQ
from project.servers.rocketmq_proxy import ClusterProxy
from tests.factories import TopicFactory
from tests.outbox.brokers.rocketmq.commit_window import QUEUES, SOON_DISCARDED, Toll, copies_in, play, sweep
from tests.rocketmq_node import own_node
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.django_db(transaction=True)]

HOURS = pytest.mark.timeout(6 * 3600)  # on each test itself: the folder gives ten minutes to all

KILLS = int(os.environ.get("FAULTS_KILLS", 3))
PROXIES = os.environ.get("FAULTS_PROXIES", "cluster").split(",")

PATIENCE = 120


@pytest.fixture(scope="module")
def node() -> Iterator[RocketMQ]:
    with own_node(SOON_DISCARDED) as found:
        yield found


@pytest.fixture(scope="module")
def cluster(node: RocketMQ) -> Iterator[ClusterProxy]:
    proxy = ClusterProxy(node).start()
    yield proxy
    proxy.kill()


@pytest.fixture
def topic(node: RocketMQ) -> Topic:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    node.make_topic(name, TopicType.TRANSACTION, QUEUES)
    return TopicFactory(name=name, type="transaction")


class TestABrokerThatIsKilledWhileHalfMessagesAreCommitted:
    @HOURS
    @pytest.mark.parametrize("proxy", PROXIES)
    def test_loses_nothing(
        self, node: RocketMQ, cluster: ClusterProxy, topic: Topic, proxy: str, figure: Callable[[str, float], None]
    ):
        endpoints = cluster.endpoints if proxy == "cluster" else node.endpoints
        options = {"ENDPOINTS": endpoints, "NAME_SERVERS": [node.name_server]}

        toll = play(node, topic, KILLS, **options)
        open_batches = Batch.objects.exclude(state=3).count()
        sweep(options, topic)
        toll.copies = copies_in(node, topic.name)

        say(figure, f"{proxy} proxy, answered ends", toll)
        figure(f"{proxy} proxy: batches left without an answer", open_batches)
        assert toll.answered
        assert toll.lost == set()

    @HOURS
    def test_loses_messages_where_only_the_proxy_answers(
        self, node: RocketMQ, cluster: ClusterProxy, topic: Topic, figure: Callable[[str, float], None]
    ):
        options: dict[str, Any] = {"ENDPOINTS": cluster.endpoints, "UNCONFIRMED_ENDS": True}

        toll = play(node, topic, min(KILLS, 10), **options)
        seen: list[int] = []

        def is_quiet() -> bool:
            """Nothing more is shown: the broker has given up asking."""
            seen.append(copies_in(node, topic.name).total())
            return len(seen) > 60 and len(set(seen[-60:])) == 1

        wait_until(is_quiet, PATIENCE)
        toll.copies = copies_in(node, topic.name)

        say(figure, "cluster proxy, its word alone", toll)
        assert toll.lost_behind_an_ok


def say(figure: Callable[[str, float], None], name: str, toll: Toll) -> None:
    figure(f"{name}: kills", toll.kills)
    figure(f"{name}: messages", len(toll.committed))
    figure(f"{name}: answered by OK", len(toll.answered))
    figure(f"{name}: of those lost", len(toll.lost_behind_an_ok))
    figure(f"{name}: second copies", toll.more_copies)
