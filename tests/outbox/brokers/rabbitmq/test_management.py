"""What the management plugin knows beyond AMQP: policies, and the members of quorum queues."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import amqp
import pytest

from outbox.brokers.rabbitmq import RabbitMQBroker
from project.servers.program import HOST, free_port
from project.servers.rabbitmq import USERS, RabbitMQ
from tests.outbox.brokers.rabbitmq.conftest import Open
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

CONFIG = "management.tcp.ip = {host}\nmanagement.tcp.port = {port}\n"


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RabbitMQ, str]]:
    """Yield a node with the plugin, and the plugin's URL."""
    port = free_port()
    settings = CONFIG.format(host=HOST, port=port)
    with RabbitMQ(tmp_path_factory.mktemp("managed"), settings=settings, plugins=["rabbitmq_management"]) as node:
        url = f"http://{HOST}:{port}"
        wait_until(lambda: _answers(url))
        yield node, url


@pytest.fixture
def managed_broker(managed: tuple[RabbitMQ, str], open_broker: Open) -> RabbitMQBroker:
    node, url = managed
    return open_broker(NODES=[node.address], MANAGEMENT_URL=url)


class TestPolicy:
    def test_of_somebody_elses_queues_is_none_of_our_business(self, managed, managed_broker):
        node, _ = managed
        node.call("rabbit_policy:parse_set", "/", "theirs", "^mails", json.dumps({"overflow": "drop-head"}), "0", "all")

        assert managed_broker.check() == []

    @pytest.mark.parametrize("function", ["parse_set", "parse_set_op"])
    def test_that_changes_a_queue_is_named(self, managed, managed_broker, topic, function):
        node, _ = managed
        managed_broker.check()
        node.call(f"rabbit_policy:{function}", "/", "short", f"^{topic}", json.dumps({"message-ttl": 60_000}), "0", "all")

        [problem] = wait_until(managed_broker.check)

        assert (
            f"A policy ('short') sets message-ttl=60000 for queues '{topic}:billing', '{topic}:billing:given-up'" in problem.text
        )
        assert problem.hint


class TestABinding:
    def test_that_is_missing_is_named(self, managed, managed_broker, topic):
        node, _ = managed
        managed_broker.check()
        with amqp.Connection(node.address) as connection:
            connection.channel().queue_unbind(f"{topic}:billing", topic, routing_key="#")

        [problem] = wait_until(managed_broker.check)

        assert problem.text == f"Queue '{topic}:billing' is not bound to topic '{topic}': group 'billing' gets nothing."


class TestMembers:
    def test_are_too_few_where_several_nodes_are_configured(self, managed, open_broker: Open):
        node, url = managed
        nodes = [node.address, node.address.replace(HOST, "localhost")]

        [problem] = open_broker(NODES=nodes, MANAGEMENT_URL=url).check()

        assert "1 member, where 2 nodes can have one" in problem.text
        assert "rabbitmq-queues grow" in problem.hint


class TestApi:
    def test_that_does_not_answer_is_named(self, managed, open_broker: Open):
        node, _ = managed

        [problem] = open_broker(NODES=[node.address], MANAGEMENT_URL=f"http://{HOST}:{free_port()}").check()

        assert "management API of RabbitMQ does not answer" in problem.text

    @pytest.mark.parametrize("url", ["http://{node}", "http://{node}x"])
    def test_that_is_no_management_api_is_named(self, managed, open_broker: Open, url):
        node, _ = managed

        [problem] = open_broker(NODES=[node.address], MANAGEMENT_URL=url.format(node=node.address)).check()

        assert "management API of RabbitMQ does not answer" in problem.text

    def test_that_refuses_the_user_is_named(self, managed, open_broker: Open):
        node, url = managed
        node.call(f"{USERS}:add_user", "shop", "secret")
        node.call(f"{USERS}:set_permissions", "shop", "/", ".*", ".*", ".*")

        [problem] = open_broker(NODES=[node.address], MANAGEMENT_URL=url, USER="shop", PASSWORD="secret").check()

        assert "401" in problem.text
        assert "set_user_tags" in problem.hint


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()  # noqa: S310
    except urllib.error.URLError:
        return False
    return True
