"""What `outbox_topics` finds and creates at a real RabbitMQ."""

import subprocess
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import amqp
import pytest
from msgspec.structs import replace

from outbox.brokers.base import Outgoing, ServerResource
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.errors import BrokerMisconfigured, BrokerUnavailable
from outbox.message import TopicSpec, TopicType
from project.servers.rabbitmq import USERS, RabbitMQ
from tests.rabbitmq_node import server

pytestmark = [pytest.mark.rabbitmq, pytest.mark.timeout(120)]

OpenWith = Callable[..., RabbitMQBroker]


@pytest.fixture
def topic() -> TopicSpec:
    return TopicSpec(f"orders-{uuid.uuid4().hex[:8]}", TopicType.NORMAL, groups=frozenset({"cart"}))


@pytest.fixture
def open_with() -> Iterator[OpenWith]:
    """Open a broker with topics."""
    opened: list[RabbitMQBroker] = []

    def open_with(*topics: TopicSpec, **options: Any) -> RabbitMQBroker:
        opened.append(broker := RabbitMQBroker("default", {"NODES": [server().address], **options}, topics))
        return broker

    yield open_with
    for broker in opened:
        broker.close()


@pytest.fixture
def own_host(request: pytest.FixtureRequest) -> Iterator[tuple[RabbitMQ, dict[str, str]]]:
    """A virtual host in which nothing is declared, and a user of its own there; yield the options that name both."""
    node, name = server(), f"{getattr(request, 'param', 'host')}-{uuid.uuid4().hex[:8]}"
    node.call("rabbit_vhost:add", name)
    node.call(f"{USERS}:add_user", name, "secret")
    yield node, {"VIRTUAL_HOST": name, "USER": name, "PASSWORD": "secret"}
    node.call(f"{USERS}:delete_user", name)
    node.call("rabbit_vhost:delete", name)


def _shell_words(text: str) -> list[str]:
    """Return the words that a shell reads."""
    command = ["sh", "-c", f"printf '%s\\0' {text}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")[:-1]


def resources(broker: RabbitMQBroker, *readers: str) -> dict[str, ServerResource]:
    return {one.name: one for one in broker.list_resources(sources=[], lanes=16, readers=readers)}


class TestResources:
    def test_are_exchanges_and_the_queues_of_groups(self, open_with: OpenWith, topic: TopicSpec):
        broker = open_with(topic, MAX_LENGTH=1000)

        found = resources(broker)

        queue = found[f"{topic.name}:cart"].wanted
        assert list(found) == [topic.name, f"{topic.name}:cart:given-up", f"{topic.name}:cart"]
        assert (queue["x-message-ttl"], queue["x-max-length"], queue["x-queue-type"]) == ("604800000", "1000", "quorum")

    def test_have_no_queues_of_groups_that_may_never_receive(self, open_with: OpenWith, topic: TopicSpec):
        assert not [name for name in resources(open_with(topic), "outbox-recorder") if "recorder" in name]

    def test_are_created_in_a_host_that_has_none(self, open_with: OpenWith, topic: TopicSpec, own_host):
        node, options = own_host
        node.call(f"{USERS}:set_permissions", options["USER"], options["VIRTUAL_HOST"], ".*", ".*", ".*")
        broker = open_with(topic, **options)
        before = [one.exists for one in resources(broker).values()]

        for one in resources(broker).values():
            one.create()

        assert set(before) == {False}
        assert [(one.exists, one.differences, one.trouble) for one in resources(broker).values()] == [(True, (), "")] * 3
        assert [sent.status for sent in broker.send([Outgoing(str(uuid.uuid4()), topic.name, b"{}")])] == ["accepted"]
        assert broker.check() == []

    def test_are_not_bound_by_being_listed(self, open_with: OpenWith, topic: TopicSpec, channel: amqp.Channel):
        broker = open_with(topic)
        for one in resources(broker).values():
            one.create()
        channel.queue_unbind(f"{topic.name}:cart", topic.name, routing_key="#")

        resources(broker)

        bindings = server().control("--quiet", "list_bindings", "source_name", "destination_name")
        assert f"{topic.name}:cart:given-up\n" in bindings  # each queue is bound to the default exchange
        assert f"{topic.name}\t{topic.name}:cart\n" not in bindings

    def test_with_other_arguments_are_different(self, open_with: OpenWith, topic: TopicSpec):
        for one in resources(open_with(topic)).values():
            one.create()

        found = resources(open_with(replace(topic, retention=timedelta(days=1))))

        [difference] = found[f"{topic.name}:cart"].differences
        assert "inequivalent arg 'x-message-ttl'" in difference
        assert "received '86400000' but current is '604800000'" in difference
        assert found[topic.name].differences == ()


class TestPermissions:
    def test_that_are_missing_are_named_with_the_command_that_grants_them(self, open_with: OpenWith, topic: TopicSpec, own_host):
        node, options = own_host
        node.call(f"{USERS}:set_permissions", options["USER"], options["VIRTUAL_HOST"], r"^outbox\..*", ".*", ".*")
        missing = resources(open_with(topic, **options))

        with pytest.raises(BrokerMisconfigured) as refused:
            missing[topic.name].create()

        assert f"RabbitMQ did not declare topic {topic.name!r}" in str(refused.value)
        assert "lacks the permission to configure" in str(refused.value)
        assert f"rabbitmqctl set_permissions -p {options['VIRTUAL_HOST']}" in str(refused.value)

    @pytest.mark.parametrize("own_host", ["our $HOST's & co"], indirect=True)
    def test_are_granted_by_the_command_whatever_the_names(self, open_with: OpenWith, topic: TopicSpec, own_host):
        node, options = own_host
        node.call(f"{USERS}:set_permissions", options["USER"], options["VIRTUAL_HOST"], "^$", "^$", "^$")
        missing = resources(open_with(topic, **options))
        with pytest.raises(BrokerMisconfigured) as refused:
            missing[topic.name].create()

        node.control(*_shell_words(str(refused.value).partition("rabbitmqctl ")[2]))
        missing[topic.name].create()

        assert resources(open_with(topic, **options))[topic.name].exists

    def test_of_a_wrong_password_are_named(self, open_with: OpenWith, topic: TopicSpec, own_host):
        _, options = own_host

        with pytest.raises(BrokerUnavailable, match="ACCESS_REFUSED"):
            resources(open_with(topic, **options | {"PASSWORD": "wrong"}))
