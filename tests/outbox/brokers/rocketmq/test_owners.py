"""
Two projects, each with a database of its own, whose name servers do not all answer.

What holds while they do is in tests/contracts/test_owners.py.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta

import pytest

from outbox.brokers.base import Outgoing
from outbox.brokers.options import read_options
from outbox.brokers.owners import GroupOwner
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.options import RocketMQOptions
from outbox.brokers.rocketmq.owners import NAME_SERVER_ERRORS, RETRY_SECONDS, RocketMQOwners
from outbox.brokers.rocketmq.remoting import requests
from outbox.message import TopicSpec, TopicType
from project.servers.rocketmq import RocketMQ
from tests.clock import Clock
from tests.contracts.acts import BLOG, SHOP
from tests.outbox.brokers.rocketmq.port_stub import PortStub
from tests.waiting import wait_until


class TestGroup:
    def test_is_received_for_while_no_name_server_answers(self, server: RocketMQ):
        topic, group = f"orders-{uuid.uuid4().hex[:8]}", f"billing-{uuid.uuid4().hex[:8]}"
        server.make_topic(topic, TopicType.NORMAL)
        server.make_group(group)
        message = Outgoing(message_id=uuid.uuid4().hex, topic=topic, body=b"{}")
        given = {"ENDPOINTS": server.endpoints, "NAME_SERVERS": [server.name_server]}
        cut_off = {**given, "NAME_SERVERS": ["127.0.0.1:1"], "UNCONFIRMED_ENDS": True}
        hold = {"limit": 10, "invisible_for": timedelta(minutes=1), "wait": timedelta(seconds=1)}

        spec = TopicSpec(topic, TopicType.NORMAL)
        with closing(RocketMQBroker("default", given, [spec])) as sender:
            sender.send([message])

        with closing(RocketMQBroker("default", cut_off, [spec])) as broker:
            broker.set_owner(group, *SHOP)
            [delivery] = wait_until(lambda: broker.receive(group, [topic], **hold), 60)
            broker.ack([delivery])

        assert delivery.message_id == message.message_id


@pytest.fixture
def name_servers() -> Iterator[tuple[PortStub, PortStub]]:
    first, second = PortStub(), PortStub()
    yield first, second
    first.stop()
    second.stop()


@pytest.fixture
def owners_of(name_servers: tuple[PortStub, PortStub], clock: Clock) -> Iterator[Callable[[tuple[str, str]], RocketMQOwners]]:
    """Return the owners as a project's client of both name servers sees them; it has a group "billing"."""
    clients: list[RocketMQClient] = []

    def owners_of(project: tuple[str, str]) -> RocketMQOwners:
        options = {"ENDPOINTS": "127.0.0.1:1", "NAME_SERVERS": [one.address for one in name_servers]}
        clients.append(RocketMQClient(read_options(RocketMQOptions, options)))
        owners = RocketMQOwners(clients[-1], clock)
        owners.set("billing", GroupOwner.of(*project))
        return owners

    yield owners_of
    for client in clients:
        client.close()


class TestNameServers:
    def test_are_believed_in_the_order_of_settings(self, owners_of, name_servers):
        first, second = name_servers
        second.stop()
        owners_of(BLOG).may_receive("billing")
        second.start()
        second.entries = {key: f"{SHOP[0].removeprefix('urn:uuid:')} shop" for key in first.entries}

        found = {name: owners_of(project).may_receive("billing") for name, project in (("shop", SHOP), ("blog", BLOG))}

        assert found == {"shop": False, "blog": True}

    def test_get_the_note_when_they_are_there_again(self, owners_of, name_servers):
        first, second = name_servers
        first.stop()
        assert owners_of(SHOP).may_receive("billing")
        first.start()

        assert owners_of(SHOP).may_receive("billing")

        assert first.entries == second.entries != {}

    def test_are_asked_again_where_one_did_not_store_the_note(self, owners_of, name_servers, clock):
        first, second = name_servers
        first.say(requests.PUT_KV_CONFIG, requests.SYSTEM_ERROR, "disk full", times=1)
        shop = owners_of(SHOP)
        assert shop.may_receive("billing")
        clock.now += RETRY_SECONDS

        assert shop.may_receive("billing")

        assert first.entries == second.entries != {}

    def test_all_have_to_answer_to_a_take_over(self, owners_of, name_servers):
        _, second = name_servers
        owners_of(SHOP).may_receive("billing")
        second.stop()

        with pytest.raises(NAME_SERVER_ERRORS):
            owners_of(BLOG).take_over("billing")

        second.start()
        owners_of(BLOG).take_over("billing")
        assert [list(one.entries.values()) for one in name_servers] == [[f"{BLOG[0].removeprefix('urn:uuid:')} blog"]] * 2
