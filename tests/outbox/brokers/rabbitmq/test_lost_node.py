"""A node of a cluster that is lost, with what consumers have received over it: the others get it when the node is back."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from outbox.brokers.base import Outgoing
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.message import TopicSpec, TopicType
from project.servers.rabbitmq import Cluster
from tests.outbox.brokers.rabbitmq.acts import receive_all
from tests.outbox.brokers.rabbitmq.conftest import HELD
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.rabbitmq, pytest.mark.timeout(300)]

TOPIC = "orders"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, 3) as cluster:
        yield cluster


def connected_to(cluster: Cluster, node: int) -> RabbitMQBroker:
    options = {"NODES": [cluster.nodes[node].address], "GROUPS": {TOPIC: ["billing"]}, "REQUEST_TIMEOUT": "PT10S"}
    return RabbitMQBroker(f"at node {node}", options, [TopicSpec(TOPIC, TopicType.NORMAL)])


def test_what_was_held_over_a_lost_node_comes_to_others(cluster: Cluster):
    first, second = connected_to(cluster, 0), connected_to(cluster, 1)
    messages = [Outgoing(f"message-{number}", TOPIC, b"{}") for number in range(6)]
    first.send(messages)  # declared over the first node, which has the leaders then
    held = wait_until(lambda: second.receive("billing", [TOPIC], limit=5, invisible_for=HELD, wait=timedelta(seconds=5)))
    second.ack(held[1:2])

    wait_until(lambda: cluster.nodes[1].knows_after_crash(f"{TOPIC}:billing"))
    cluster.nodes[1].kill()
    cluster.nodes[1].start()

    left = {one.message_id for one in messages} - {held[1].message_id}
    assert len(held) > 2
    assert left <= set(receive_all(first, TOPIC, left))
    first.close()
    second.close()
