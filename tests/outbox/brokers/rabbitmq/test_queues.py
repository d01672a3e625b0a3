"""Queues and exchanges that are full, deleted or declared otherwise, and messages that the server refuses."""

from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta

import amqp
import pytest
from msgspec.structs import replace

from outbox.brokers.base import Delivery, Outgoing, SendStatus
from outbox.brokers.rabbitmq import RabbitMQBroker, receiver, sender
from outbox.errors import BrokerUnavailable
from outbox.logs import REPEAT_SECONDS
from outbox.message import TopicSpec, TopicType
from project.servers.rabbitmq import USERS, RabbitMQ
from tests.outbox.brokers.rabbitmq.acts import accepted, drain, receive_all, received, refused, statuses
from tests.outbox.brokers.rabbitmq.conftest import HELD, Open
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

NewMessage = Callable[..., Outgoing]

SECOND = timedelta(seconds=1)


class TestFullQueue:
    def test_is_an_outage_until_somebody_receives(self, open_broker: Open, message: NewMessage, topic):
        broker = open_broker(MAX_LENGTH=3)
        filled = [result for _ in range(8) for result in broker.send([message()])]  # it takes some more than its length

        [held, *rest] = broker.receive("billing", [topic], limit=10, invisible_for=HELD, wait=timedelta(seconds=5))
        broker.ack([held, *rest])

        assert filled[-1].status is SendStatus.UNAVAILABLE
        assert "a queue is full" in filled[-1].reason
        assert statuses(wait_until(lambda: accepted(broker, message()))) == [SendStatus.ACCEPTED]


class TestBacklog:
    def test_leaves_a_topic_out_whose_queue_was_deleted(self, open_broker: Open, node: RabbitMQ, topic):
        broker = open_broker()
        drain(broker, topic)
        before = broker.backlog("billing").waiting

        with amqp.Connection(node.address) as connection:
            connection.channel().queue_delete(f"{topic}:billing")

        assert before == {topic: 0}
        assert broker.backlog("billing").waiting == {}


class TestFullQueueOfOneGroup:
    def test_leaves_copies_with_the_others(self, open_broker: Open, message: NewMessage, topic):
        broker = open_broker(MAX_LENGTH=3, GROUPS={topic: ["billing", "shipping"]})
        one = message()
        drained: list[str] = []

        def fill() -> bool:
            drained.extend(drain(broker, topic))
            return refused(broker, message()) is not None

        wait_until(fill)
        drained.clear()
        tries = []
        for _ in range(2):
            drain(broker, topic)
            tries += statuses(broker.send([one]))
            drained += wait_until(lambda: drain(broker, topic))

        assert tries == [SendStatus.UNAVAILABLE] * 2
        assert drained.count(one.message_id) == 2


class TestAGroupOfTheCode:
    def test_gets_what_is_sent_before_it_first_receives(self, node, message: NewMessage, topic):
        spec = TopicSpec(topic, TopicType.NORMAL, groups=frozenset({"billing"}))
        with closing(RabbitMQBroker("rabbit", {"NODES": [node.address]}, [spec])) as broker:
            sent = broker.send([message()])

            assert statuses(sent) == [SendStatus.ACCEPTED]
            assert len(wait_until(lambda: received(broker, topic))) == 1

    def test_that_neither_code_nor_options_name_loses_nothing(self, open_broker: Open, message: NewMessage):
        sent = open_broker(GROUPS={}).send([message()])

        assert statuses(sent) == [SendStatus.MISCONFIGURED]


class TestDeletedQueue:
    @pytest.mark.parametrize("groups", [["billing"], ["billing", "shipping"]], ids=["the only group", "one of two"])
    def test_is_declared_again_before_anything_is_sent(
        self, open_broker: Open, channel: amqp.Channel, message: NewMessage, topic, groups
    ):
        broker = open_broker(GROUPS={topic: groups})
        broker.send([message()])
        channel.queue_delete(f"{topic}:billing")

        later = broker.send([message(b"later")])

        assert statuses(later) == [SendStatus.ACCEPTED]
        assert [one.body for one in wait_until(lambda: received(broker, topic))] == [b"later"]

    def test_of_a_group_that_options_do_not_name_is_declared_again_by_its_consumers(
        self, open_broker: Open, channel: amqp.Channel, message: NewMessage, topic
    ):
        broker = open_broker(GROUPS={})
        broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta())
        channel.queue_delete(f"{topic}:billing")

        astray = broker.send([message()])
        broker.receive("billing", [topic], limit=1, invisible_for=HELD, wait=timedelta(seconds=1))
        later = broker.send([message(b"later")])

        assert statuses(astray) == [SendStatus.MISCONFIGURED]
        assert f"No queue takes messages of '{topic}'" in astray[0].reason
        assert statuses(later) == [SendStatus.ACCEPTED]
        assert [one.body for one in wait_until(lambda: received(broker, topic))] == [b"later"]


class TestDeletedExchange:
    def test_is_declared_again(self, broker, channel: amqp.Channel, message: NewMessage, topic):
        broker.send([message()])
        channel.exchange_delete(topic)

        first = broker.send([message()])
        second = broker.send([message()])

        assert statuses(first) == [SendStatus.MISCONFIGURED]
        assert "no exchange" in first[0].reason
        assert statuses(second) == [SendStatus.ACCEPTED]

    def test_is_declared_again_before_anything_is_sent_a_moment_later(
        self, broker, channel: amqp.Channel, message: NewMessage, topic, monkeypatch
    ):
        monkeypatch.setattr(sender, "BIND_SECONDS", 0.0)
        broker.send([message()])
        channel.exchange_delete(topic)

        assert statuses(broker.send([message()])) == [SendStatus.ACCEPTED]

    def test_that_another_project_declares_first_keeps_our_group(
        self, broker, channel: amqp.Channel, message: NewMessage, topic, monkeypatch
    ):
        monkeypatch.setattr(sender, "BIND_SECONDS", 0.0)
        before, after = message(), message()
        broker.send([before])
        channel.exchange_delete(topic)
        channel.exchange_declare(topic, "topic", durable=True, auto_delete=False)
        channel.queue_declare(f"{topic}:theirs", durable=True, auto_delete=False)
        channel.queue_bind(f"{topic}:theirs", topic, routing_key="#")

        [sent] = broker.send([after])

        assert sent.status is SendStatus.ACCEPTED  # also where their queue alone has it
        assert set(receive_all(broker, topic, 2)) == {before.message_id, after.message_id}
        channel.queue_delete(f"{topic}:theirs")

    def test_of_a_group_that_options_do_not_name_is_bound_again_by_its_consumers(
        self, open_broker: Open, channel: amqp.Channel, message: NewMessage, topic, monkeypatch
    ):
        monkeypatch.setattr(receiver, "DECLARE_SECONDS", 0.0)
        broker = open_broker(GROUPS={})
        received(broker, topic)
        channel.exchange_delete(topic)
        channel.exchange_declare(topic, "topic", durable=True, auto_delete=False)

        received(broker, topic)

        assert statuses(broker.send([message()])) == [SendStatus.ACCEPTED]


class TestDeclaredOtherwise:
    def test_is_named_with_the_difference_and_can_be_drained(self, open_broker: Open, message: NewMessage, topic):
        open_broker().send([message(b"old")])
        other = open_broker(MAX_LENGTH=5)

        [result] = other.send([message()])
        drained = wait_until(lambda: received(other, topic))

        assert result.status is SendStatus.MISCONFIGURED
        assert "x-max-length" in result.reason
        assert "x-max-length" in other.check()[0].text
        assert "x-max-length" in other.refusals[topic]
        assert [one.body for one in drained] == [b"old"]

    def test_is_logged_once_a_minute_as_long_as_it_lasts(
        self, open_broker: Open, message: NewMessage, topic, caplog, monkeypatch, pass_in_log
    ):
        monkeypatch.setattr(receiver, "DECLARE_SECONDS", 0.1)
        open_broker().send([message(b"old")])
        other = open_broker(MAX_LENGTH=5)
        wait_until(lambda: received(other, topic))

        pass_in_log(REPEAT_SECONDS)

        wait_until(lambda: received(other, topic) or len(caplog.records) == 2, seconds=10)
        assert all("cannot receive from topic" in line and "x-max-length" in line for line in caplog.messages)

    @pytest.mark.parametrize("kind", [TopicType.NORMAL, TopicType.FIFO])
    def test_leaves_the_groups_other_topics_alone(self, node: RabbitMQ, topic, kind):
        names = [topic, f"{topic}-2"]
        options = {"NODES": [node.address], "GROUPS": {name: ["billing"] for name in names}}
        specs = [TopicSpec(name, kind) for name in names]
        changed = [replace(specs[0], retention=timedelta(days=2)), specs[1]]
        before, after = RabbitMQBroker("a", options, specs), RabbitMQBroker("b", options, changed)
        before.send([Outgoing(name, name, b"a", key="k") for name in names])
        before.close()

        results = after.send([Outgoing(f"{name}-new", name, b"b", key="l") for name in names])
        found: dict[str, str] = {}

        def receive() -> bool:
            deliveries = after.receive("billing", names, limit=10, invisible_for=HELD, wait=timedelta(seconds=1))
            found.update({one.message_id: one.topic for one in deliveries})
            after.ack(deliveries)
            return len(found) == 3

        wait_until(receive)
        assert statuses(results) == [SendStatus.MISCONFIGURED, SendStatus.ACCEPTED]
        assert found == {names[0]: names[0], names[1]: names[1], f"{names[1]}-new": names[1]}
        assert list(after.refusals) == [topic]
        after.close()

    def test_is_no_longer_named_when_it_was_deleted(
        self, open_broker: Open, channel: amqp.Channel, message: NewMessage, topic, monkeypatch
    ):
        monkeypatch.setattr(receiver, "CHANNEL_SECONDS", 0.5)
        open_broker().send([message()])
        other = open_broker(MAX_LENGTH=5)
        other.ack(received(other, topic))
        channel.queue_delete(f"{topic}:billing")

        results = wait_until(lambda: accepted(other, message(b"new")))
        found = [one.body for one in wait_until(lambda: received(other, topic))]
        wait_until(lambda: received(other, topic) == [] and other.refusals == {})

        assert statuses(results) == [SendStatus.ACCEPTED]
        assert found == [b"new"]


def count_waits(broker: RabbitMQBroker, receive: Callable[[], object]) -> int:
    """Return how often a receive waited on its connection."""
    connection, waits = broker._receiver._connection, []
    wait = connection.wait
    connection.wait = lambda *arguments: waits.append(wait(*arguments))  # type: ignore[method-assign]
    receive()
    return len(waits)


class TestQueueThatMayNotBeRead:
    def test_leaves_the_groups_other_topics_alone(self, node: RabbitMQ, topic):
        names = [topic, f"{topic}-2"]
        options = {"NODES": [node.address], "GROUPS": {name: ["billing"] for name in names}}
        specs = [TopicSpec(name, TopicType.NORMAL) for name in names]
        owner = RabbitMQBroker("a", options, specs)
        owner.send([Outgoing(name, name, b"a") for name in names])
        node.call(f"{USERS}:add_user", topic, "secret")
        node.call(f"{USERS}:set_permissions", topic, "/", ".*", ".*", rf"^(outbox\..*|{topic}|{names[1]}.*)$")
        broker = RabbitMQBroker("b", {**options, "USER": topic, "PASSWORD": "secret"}, specs)

        def receive() -> list[Delivery]:
            with suppress(BrokerUnavailable):
                return broker.receive("billing", names, limit=10, invisible_for=HELD, wait=timedelta(seconds=1))
            return []

        found = wait_until(receive)

        waits = count_waits(broker, lambda: broker.receive("billing", names, limit=1, invisible_for=HELD, wait=2 * SECOND))

        assert [one.topic for one in found] == [names[1]]
        assert "ACCESS_REFUSED" in broker.refusals[topic]
        assert waits < 20  # it waits, and does not look again and again
        for one in (owner, broker):
            one.close()
        node.call(f"{USERS}:delete_user", topic)


class TestMessageTooLargeForTheServer:
    def test_is_refused_and_costs_its_batch_one_more_round(self, open_broker: Open, message: NewMessage, topic, tmp_path):
        with RabbitMQ(tmp_path / "small", settings="max_message_size = 1000\n") as node:
            broker = open_broker(NODES=[node.address])
            bodies = [b"x" * 2000 if n in (7, 60) else b"%d" % n for n in range(100)]

            results = broker.send([message(body) for body in bodies])
            found = receive_all(broker, topic, 98)

            refused = {n: one.reason for n, one in enumerate(results) if one.status is not SendStatus.ACCEPTED}
            assert {one.status for one in results} == {SendStatus.ACCEPTED, SendStatus.REFUSED}
            assert refused.keys() == {7, 60}
            assert all("message size" in reason for reason in refused.values())
            assert max(found.count(one) for one in found) <= 2  # those before the large one may have been stored the first time
            assert (tmp_path / "small/log").read_text().count("caused a channel exception") == 1
            broker.close()
