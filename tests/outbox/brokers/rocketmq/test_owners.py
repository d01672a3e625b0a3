"""Two projects, each with a database of its own, on one RocketMQ."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from outbox.brokers.base import Delivery, Outgoing
from outbox.brokers.options import read_options
from outbox.brokers.owners import GroupOwner
from outbox.brokers.rocketmq import RocketMQBroker
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.options import RocketMQOptions
from outbox.brokers.rocketmq.owners import AGAIN_SECONDS, UNANSWERED, RocketMQOwners
from outbox.brokers.rocketmq.remoting import requests
from outbox.message import TopicSpec, TopicType
from project.servers.rocketmq import RocketMQ
from tests.outbox.brokers.rocketmq.port_stub import PortStub
from tests.waiting import wait_until

SHOP = "urn:uuid:7a0e9f0e-0000-4000-8000-00000000000a", "shop"
BLOG = "urn:uuid:7a0e9f0e-0000-4000-8000-00000000000b", "blog"

Join = Callable[..., RocketMQBroker]


@pytest.fixture
def topic(server: RocketMQ) -> str:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    server.make_topic(name, TopicType.NORMAL)
    return name


@pytest.fixture
def group(server: RocketMQ) -> str:
    name = f"billing-{uuid.uuid4().hex[:8]}"
    server.make_group(name)
    return name


@pytest.fixture
def join(server: RocketMQ, topic: str, group: str) -> Iterator[Join]:
    """Open a client of a project's group."""
    opened: list[RocketMQBroker] = []

    def join(project: tuple[str, str], name: str = group, **options: object) -> RocketMQBroker:
        given = {"ENDPOINTS": server.endpoints, "NAME_SERVERS": [server.name_server], **options}
        opened.append(RocketMQBroker("default", given, [TopicSpec(topic, TopicType.NORMAL)]))
        opened[-1].set_owner(name, *project)
        return opened[-1]

    yield join
    for broker in opened:
        broker.close()


def receive_held(broker: RocketMQBroker, group: str) -> list[Delivery]:
    arguments = {"limit": 10, "invisible_for": timedelta(minutes=1), "wait": timedelta(seconds=1)}
    return broker.receive(group, list(broker.topics), **arguments)


def receive(broker: RocketMQBroker, group: str) -> list[str]:
    """Receive and acknowledge what is there; return the ids."""
    found = receive_held(broker, group)
    broker.ack(found)
    return [one.message_id for one in found]


def send(broker: RocketMQBroker, topic: str) -> str:
    message = Outgoing(message_id=uuid.uuid4().hex, topic=topic, body=b"{}")
    [result] = broker.send([message])
    assert result.status == "accepted"
    return message.message_id


class TestGroupOfAnotherProject:
    def test_receives_nothing_and_names_the_owner(self, join, topic, group, caplog):
        shop, blog = join(SHOP), join(BLOG)
        receive(shop, group)
        sent = send(shop, topic)

        taken = [receive(blog, group) for _ in range(3)]

        assert taken == [[], [], []]
        assert f"Consumer group '{group}' belongs to the project 'shop' (outbox {SHOP[0]})" in blog.refusals[topic]
        assert caplog.text.count("belongs to the project 'shop'") == 1
        assert wait_until(lambda: receive(shop, group), 60) == [sent]
        assert shop.refusals == {}

    def test_is_found_by_check_with_what_to_do(self, join, group):
        shop, blog = join(SHOP), join(BLOG)
        receive(shop, group)

        [problem] = [one for one in blog.check() if "belongs to" in one.text]

        assert "Give this group another name, or each project a NAMESPACE of its own" in problem.hint
        assert f"outbox_consume --group {group} --take-over" in problem.hint
        assert not [one for one in shop.check() if "belongs to" in one.text]

    def test_receives_nothing_that_the_server_gave_up(self, join, topic, group, server):
        shop, blog = join(SHOP), join(BLOG)
        server.make_group(group, retries=1)
        sent = send(shop, topic)

        def given_up() -> list[str]:
            shop.release(receive_held(shop, group))
            return [delivery.message_id for delivery in shop.receive_given_up(group, [topic], limit=10)]

        assert wait_until(given_up, 60) == [sent]
        assert blog.receive_given_up(group, [topic], limit=10) == []

    def test_owns_it_after_it_was_taken_over(self, join, topic, group):
        shop, blog = join(SHOP), join(BLOG)
        receive(shop, group)
        sent = send(shop, topic)

        blog.set_owner(group, *BLOG, take_over=True)

        assert wait_until(lambda: receive(blog, group), 60) == [sent]
        again = join(SHOP)
        assert receive(again, group) == []
        assert "belongs to the project 'blog'" in again.refusals[topic]

    def test_is_not_the_old_owners_again_after_it_was_taken_over(self, join, topic, group):
        shop, blog = join(SHOP), join(BLOG)
        receive(shop, group)
        blog.set_owner(group, *BLOG, take_over=True)
        again = join(SHOP)

        receive(again, group)

        assert "belongs to the project 'blog'" in again.refusals[topic]


class TestGroupOfOneProject:
    def test_is_shared_by_its_processes_and_under_another_name(self, join, group):
        first, second = join(SHOP), join((SHOP[0], "market"))

        receive(first, group)
        receive(second, group)

        assert first.refusals == second.refusals == {}

    def test_is_received_for_while_no_name_server_answers(self, join, topic, group):
        sent = send(join(SHOP), topic)
        cut_off = join(SHOP, NAME_SERVERS=["127.0.0.1:1"], UNCONFIRMED_ENDS=True)

        assert wait_until(lambda: receive(cut_off, group), 60) == [sent]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


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
        clock.now += AGAIN_SECONDS

        assert shop.may_receive("billing")

        assert first.entries == second.entries != {}

    def test_all_have_to_answer_to_a_take_over(self, owners_of, name_servers):
        _, second = name_servers
        owners_of(SHOP).may_receive("billing")
        second.stop()

        with pytest.raises(UNANSWERED):
            owners_of(BLOG).take_over("billing")

        second.start()
        owners_of(BLOG).take_over("billing")
        assert [list(one.entries.values()) for one in name_servers] == [[f"{BLOG[0].removeprefix('urn:uuid:')} blog"]] * 2
