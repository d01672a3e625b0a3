"""Two projects, each with a database of its own, in one virtual host."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

import pytest

from outbox.brokers.base import Outgoing
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.message import TopicSpec, TopicType
from tests.outbox.brokers.rabbitmq.acts import accepted
from tests.outbox.brokers.rabbitmq.conftest import HELD, Open
from tests.waiting import wait_until

pytestmark = pytest.mark.rabbitmq

SHOP = "urn:uuid:7a0e9f0e-0000-4000-8000-00000000000a", "shop"
BLOG = "urn:uuid:7a0e9f0e-0000-4000-8000-00000000000b", "blog"

Join = Callable[..., RabbitMQBroker]


@pytest.fixture
def join(open_broker: Open) -> Join:
    """Open a client of a project's group."""

    def join(project: tuple[str, str], group: str = "billing", **options: object) -> RabbitMQBroker:
        broker = open_broker(**options)
        broker.set_owner(group, *project)
        return broker

    return join


def receive(broker: RabbitMQBroker, group: str = "billing", seconds: float = 0.0) -> list[str]:
    """Receive and acknowledge what is there; return the ids."""
    found = broker.receive(group, list(broker.topics), limit=10, invisible_for=HELD, wait=timedelta(seconds=seconds))
    broker.ack(found)
    return [one.message_id for one in found]


def send(broker: RabbitMQBroker, message: Outgoing) -> str:
    """Send until the server has stored it; return the id."""
    wait_until(lambda: accepted(broker, message))
    return message.message_id


class TestGroupOfAnotherProject:
    @pytest.mark.parametrize("kind", [TopicType.NORMAL, TopicType.FIFO])
    def test_receives_nothing_and_names_the_owner(self, join, message, topic, kind, caplog):
        shop, blog = join(SHOP, kind=kind), join(BLOG, kind=kind)
        receive(shop)
        sent = send(shop, message(key="7"))

        taken = receive(blog, seconds=0.5)

        assert taken == []
        assert f"Queue '{topic}:billing' belongs to the outbox {SHOP[0]}" in blog.refusals[topic]
        assert f"this is the project 'blog' (outbox {BLOG[0]})" in caplog.text
        assert receive(shop, seconds=5) == [sent]
        assert shop.refusals == {}

    def test_is_found_by_check_with_what_to_do(self, join, topic):
        shop, blog = join(SHOP), join(BLOG)
        receive(shop)

        (problem,) = blog.check()

        assert f"belongs to the outbox {SHOP[0]}" in problem.text
        assert "Give this group another name, or each project a virtual host of its own" in problem.hint
        assert "outbox_consume --group billing --take-over" in problem.hint
        assert shop.check() == []

    def test_owns_it_after_it_was_taken_over(self, join, message):
        shop, blog = join(SHOP), join(BLOG)
        receive(shop)
        shop.close()
        sent = send(blog, message())

        blog.set_owner("billing", *BLOG, take_over=True)

        assert receive(blog, seconds=5) == [sent]
        again = join(SHOP)
        assert receive(again) == []
        assert f"belongs to the outbox {BLOG[0]}" in again.refusals[message().topic]

    def test_is_not_the_old_owners_again_after_it_was_taken_over(self, join, topic):
        shop, blog = join(SHOP), join(BLOG)
        receive(shop)
        shop.close()
        blog.set_owner("billing", *BLOG, take_over=True)
        again = join(SHOP)

        taken = receive(again)

        assert taken == []
        assert f"belongs to the outbox {BLOG[0]}" in again.refusals[topic]

    def test_is_refused_where_names_are_so_long_that_the_servers_answer_is_cut(self, node):
        spec = TopicSpec(f"{uuid.uuid4().hex}{'t' * 120}", TopicType.NORMAL)
        options = {"NODES": [node.address]}
        with closing(RabbitMQBroker("one", options, [spec])) as shop, closing(RabbitMQBroker("two", options, [spec])) as blog:
            shop.set_owner("billing", *SHOP)
            blog.set_owner("billing", *BLOG)
            receive(shop)

            receive(blog)

            assert "belongs to another outbox" in blog.refusals[spec.name]
            assert shop.refusals == {}


class TestGroupOfOneProject:
    def test_is_shared_by_its_processes(self, join, message):
        first, second = join(SHOP), join(SHOP)
        receive(first)
        receive(second)
        sent = send(first, message())

        taken = wait_until(lambda: receive(second))

        assert taken == [sent]
        assert first.refusals == second.refusals == {}

    def test_stays_its_own_when_the_project_is_renamed(self, join, message):
        before = join(SHOP)
        receive(before)
        before.close()
        renamed = join((SHOP[0], "market"))
        sent = send(renamed, message())

        taken = receive(renamed, seconds=5)

        assert taken == [sent]

    @pytest.mark.parametrize("before", ["", "shop"])
    def test_stays_its_own_when_the_project_is_renamed_and_the_servers_answers_are_cut(self, node, before):
        spec = TopicSpec(f"{uuid.uuid4().hex}{'t' * 120}", TopicType.NORMAL)
        options = {"NODES": [node.address]}
        with closing(RabbitMQBroker("one", options, [spec])) as old, closing(RabbitMQBroker("two", options, [spec])) as renamed:
            old.set_owner("billing", SHOP[0], before)
            renamed.set_owner("billing", SHOP[0], "market")
            receive(old)
            sent = send(renamed, Outgoing(message_id=uuid.uuid4().hex, topic=spec.name, body=b"{}"))
            old.close()

            taken = receive(renamed, seconds=5)

            assert renamed.refusals == {}
            assert taken == [sent]


class TestGroupOfAnotherName:
    def test_gets_the_messages_of_another_projects_topic(self, join, message):
        shop, blog = join(SHOP, "billing"), join(BLOG, "mail")
        receive(shop, "billing")
        receive(blog, "mail")

        sent = send(shop, message())

        assert receive(blog, "mail", seconds=5) == [sent]
        assert receive(shop, "billing", seconds=5) == [sent]
