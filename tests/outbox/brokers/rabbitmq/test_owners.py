"""
Two projects, each with a database of its own, and a queue whose name is too long for the server's answer.

What holds for every name is in tests/contracts/test_owners.py.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta

import pytest

from outbox.brokers.base import Outgoing
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.message import TopicSpec, TopicType
from project.servers.rabbitmq import RabbitMQ
from tests.contracts.acts import BLOG, SHOP
from tests.outbox.brokers.rabbitmq.acts import accepted
from tests.outbox.brokers.rabbitmq.conftest import HELD
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

TOPIC = "t" * 120

Join = Callable[[str, str], RabbitMQBroker]


@pytest.fixture
def join(node: RabbitMQ) -> Iterator[Join]:
    """Open a client of a project's group."""
    spec = TopicSpec(f"{uuid.uuid4().hex}{TOPIC}", TopicType.NORMAL)
    with ExitStack() as opened:

        def join(source: str, project: str) -> RabbitMQBroker:
            broker = opened.enter_context(closing(RabbitMQBroker("one", {"NODES": [node.address]}, [spec])))
            broker.set_owner("billing", source, project)
            return broker

        yield join


def receive(broker: RabbitMQBroker, seconds: float = 0.0) -> list[str]:
    """Receive and acknowledge what is there; return the ids."""
    found = broker.receive("billing", list(broker.topics), limit=10, invisible_for=HELD, wait=timedelta(seconds=seconds))
    broker.ack(found)
    return [one.message_id for one in found]


class TestGroup:
    def test_of_another_project_is_refused(self, join):
        shop, blog = join(*SHOP), join(*BLOG)
        receive(shop)

        receive(blog)

        assert "belongs to another outbox" in blog.refusals[next(iter(blog.topics))]
        assert shop.refusals == {}

    @pytest.mark.parametrize("before", ["", "shop"])
    def test_of_the_project_stays_its_own_when_it_is_renamed(self, join, before):
        old, renamed = join(SHOP[0], before), join(SHOP[0], "market")
        receive(old)
        message = Outgoing(message_id=uuid.uuid4().hex, topic=next(iter(renamed.topics)), body=b"{}")
        wait_until(lambda: accepted(renamed, message))
        old.close()

        taken = receive(renamed, seconds=5)

        assert renamed.refusals == {}
        assert taken == [message.message_id]
