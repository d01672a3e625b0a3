"""`check()` on a real server: what is weaker there than docs/brokers/rabbitmq.md promises is named, with what to do."""

import shlex
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import amqp
import pytest

from outbox.brokers.base import Outgoing, SendStatus
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.brokers.rabbitmq.server_checks import problems_of_node
from outbox.findings import Finding
from outbox.message import TopicSpec, TopicType
from project.servers.program import HOST, free_port
from project.servers.rabbitmq import USERS, RabbitMQ
from tests.outbox.brokers.rabbitmq.conftest import HELD, Open
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

ALL = ".*"
NONE = "^$"
CAPABLE = {"publisher_confirms": True, "basic.nack": True, "consumer_cancel_notify": True, "connection.blocked": True}


@pytest.fixture
def user(node: RabbitMQ) -> Iterator[Callable[[str, str, str], dict[str, str]]]:
    """Make a user with permissions to configure, write and read; return the options that name it."""
    node.call(f"{USERS}:add_user", "shop", "secret")

    def grant(configure: str, write: str, read: str) -> dict[str, str]:
        node.call(f"{USERS}:set_permissions", "shop", "/", configure, write, read)
        return {"USER": "shop", "PASSWORD": "secret"}

    yield grant
    node.call(f"{USERS}:delete_user", "shop")


def the_one(problems: list[Finding]) -> str:
    [problem] = problems
    assert problem.hint
    return f"{problem.text} {problem.hint}"


class TestGoodServer:
    @pytest.mark.parametrize("kind", [TopicType.NORMAL, TopicType.FIFO])
    def test_has_no_problem(self, open_broker: Open, kind: TopicType):
        assert open_broker(kind).check() == []

    def test_delivers_nothing_and_loses_nothing_by_being_checked(self, broker, message: Callable[..., Outgoing], topic):
        broker.send([message(b"a")])

        assert broker.check() == broker.check() == []

        [delivery] = broker.receive("billing", [topic], limit=9, invisible_for=HELD, wait=timedelta(seconds=5))
        assert (delivery.body, delivery.delivery_count) == (b"a", 1)


class TestNode:
    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"version": "3.9.29"}, "Node rabbit-1:5672 runs RabbitMQ 3.9.29, but 3.10 is needed"),
            ({"product": "Other", "version": "2.1"}, "is Other 2.1, not RabbitMQ"),
            *(({"capabilities": {**CAPABLE, name: False}}, f"does not offer {name}") for name in CAPABLE),
        ],
        ids=["too old", "another product", *CAPABLE],
    )
    def test_that_is_not_enough_is_named(self, fields, text):
        assert text in the_one(list(problems_of_node("rabbit-1:5672", properties(**fields), 131_072)))

    @pytest.mark.parametrize("version", ["3.10.0", "3.13.7", "4.1.0"])
    def test_that_is_new_enough_is_fine(self, version):
        assert list(problems_of_node("rabbit-1:5672", properties(version=version), 131_072)) == []

    def test_with_small_frames_is_named(self, open_broker: Open, tmp_path):
        with RabbitMQ(tmp_path / "small", settings="frame_max = 8192\n") as node:
            broker = open_broker(NODES=[node.address])

            text = the_one(broker.check())
            broker.close()

            assert f"Node {node.address} has frame_max = 8192" in text

    def test_that_does_not_answer_is_named_while_another_does(self, open_broker: Open, node: RabbitMQ):
        gone = f"{HOST}:{free_port()}"

        text = the_one(open_broker(NODES=[gone, node.address]).check())

        assert f"Node {gone} does not answer" in text

    def test_of_another_cluster_is_named(self, open_broker: Open, node: RabbitMQ, tmp_path):
        with RabbitMQ(tmp_path / "other") as other:
            broker = open_broker(NODES=[node.address, other.address])

            text = the_one(broker.check())
            broker.close()

            assert "names nodes of 2 clusters" in text
            assert other.address in text


class TestQueue:
    def test_of_another_type_is_named(self, broker, channel: amqp.Channel, topic):
        channel.queue_declare(f"{topic}:billing", durable=True, auto_delete=False)

        text = the_one(broker.check())

        assert f"Group 'billing' of topic '{topic}' cannot be declared" in text
        assert "inequivalent arg 'x-queue-type'" in text
        channel.queue_delete(f"{topic}:billing")

    @pytest.mark.parametrize(
        ("options", "kind", "source"),
        [
            ({"MAX_LENGTH": 5}, TopicType.NORMAL, "MAX_LENGTH"),
            ({}, TopicType.FIFO, "TYPE"),
        ],
        ids=lambda value: str(value),
    )
    def test_with_other_arguments_is_named_with_the_setting(self, open_broker: Open, options: dict[str, Any], kind, source):
        open_broker().check()

        text = the_one(open_broker(kind, **options).check())

        assert f'set OPTIONS["{source}"]' in text or f"set the {source} of the topic" in text

    def test_of_each_group_is_named(self, open_broker: Open, topic):
        groups = {topic: ["billing", "shipping"]}
        open_broker(GROUPS=groups).check()

        found = open_broker(GROUPS=groups, MAX_LENGTH=5).check()

        assert [one.text.split("'")[1] for one in found] == ["billing", "shipping"]

    def test_that_was_deleted_is_declared_again_and_named_once(self, broker, channel: amqp.Channel, topic):
        broker.check()
        channel.queue_delete(f"{topic}:billing")

        first, second = broker.check(), broker.check()

        assert f"Queue '{topic}:billing' was missing and has been declared" in the_one(first)
        assert second == []

    def test_whose_binding_is_missing_is_left_so(self, broker, channel: amqp.Channel, topic):
        queue = f"{topic}:billing"
        broker.check()
        channel.queue_unbind(queue, topic, routing_key="#")

        broker.check()

        channel.basic_publish(amqp.Message(b"to the topic"), topic, "")
        channel.basic_publish(amqp.Message(b"to the queue"), "", queue)
        assert wait_until(lambda: channel.basic_get(queue, no_ack=True)).body == b"to the queue"

    def test_whose_topic_was_deleted_is_bound_again_and_that_is_said(self, broker, channel: amqp.Channel, message, topic):
        broker.check()
        channel.exchange_delete(topic)

        first, second = broker.check(), broker.check()

        assert f"Topic '{topic}' was missing and has been declared" in the_one(first)
        assert second == []
        assert broker.send([message()])[0].status is SendStatus.ACCEPTED


class TestPermission:
    @pytest.mark.parametrize(
        ("missing", "configure", "write", "read"),
        [
            ("configure", NONE, ALL, ALL),
            ("write", ALL, NONE, ALL),
            ("read", ALL, ALL, NONE),
        ],
        ids=["configure", "write", "read"],
    )
    def test_that_is_missing_from_the_start_is_named(self, open_broker: Open, user, missing, configure, write, read):
        problem, *_ = open_broker(**user(configure, write, read)).check()

        assert "user 'shop' lacks the permission to" in problem.text
        assert missing in problem.text
        assert "rabbitmqctl set_permissions -p / shop" in problem.hint

    @pytest.mark.parametrize(
        ("write", "read", "missing"),
        [
            (r"^outbox\..*|{topic}:.*|amq\.default$", ALL, "Topic '{topic}': user 'shop' lacks the permission to write"),
            (ALL, r"^outbox\..*|{topic}$", "Group 'billing' of topic '{topic}': user 'shop' lacks the permission to read"),
            (r"^outbox\..*|{topic}.*$", ALL, "The default exchange: user 'shop' lacks the permission"),
        ],
        ids=["topic", "queues", "default exchange"],
    )
    def test_to_send_or_receive_is_asked_for_where_all_is_declared(self, open_broker: Open, user, topic, write, read, missing):
        open_broker().check()

        found = open_broker(**user(ALL, write.format(topic=f"({topic})"), read.format(topic=f"({topic})"))).check()

        assert any(missing.format(topic=topic) in one.text for one in found), found

    def test_is_all_there_after_the_command_of_the_hint(self, open_broker: Open, node: RabbitMQ, user, message, topic):
        options = user(NONE, NONE, NONE)
        problem, *_ = open_broker(**options).check()

        command = problem.hint.removeprefix("Grant it: rabbitmqctl ")
        node.control(*shlex.split(command))
        broker = open_broker(**options)
        broker.set_owner("billing", "urn:uuid:7a0e9f0e-0000-4000-8000-00000000000a", "shop")

        assert broker.check() == []
        assert broker.send([message()])[0].status is SendStatus.ACCEPTED
        [held] = broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta(seconds=5))
        assert broker.ack([held]) == [True]
        assert (broker.refusals, broker.check()) == ({}, [])

    def test_for_the_owner_of_a_group_is_named_by_its_consumer(self, open_broker: Open, user, topic):
        broker = open_broker(**user(ALL, rf"^(outbox\.[du].*|{topic}.*|amq\.default)$", ALL))
        broker.set_owner("billing", "urn:uuid:7a0e9f0e-0000-4000-8000-00000000000a", "shop")

        broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())

        assert "exchange 'outbox.owner.7a0e9f0e" in broker.refusals[topic]
        assert "ACCESS_REFUSED" in broker.refusals[topic]


class TestAlarm:
    def test_is_named_and_gone_when_it_is_over(self, broker, node: RabbitMQ):
        broker.check()
        node.control("set_vm_memory_high_watermark", "0.00001")
        try:
            text = the_one(wait_until(broker.check))
        finally:
            node.control("set_vm_memory_high_watermark", "0.6")

        assert "short of memory or disk" in text
        assert wait_until(lambda: broker.check() == [])


class TestHeartbeat:
    def test_of_a_server_without_one_is_ours(self, tmp_path):
        with RabbitMQ(tmp_path / "mute", settings="heartbeat = 0\n") as node:
            broker = RabbitMQBroker(
                "rabbit", {"NODES": [node.address], "HEARTBEAT": "PT7S"}, [TopicSpec("orders", TopicType.NORMAL)]
            )
            broker.check()

            listed = node.control("-q", "list_connections", "timeout")
            broker.close()

        assert listed.split() == ["timeout", "7"]


def properties(**fields: Any) -> dict[str, Any]:
    return {"product": "RabbitMQ", "version": "3.10.8", "capabilities": CAPABLE, **fields}
