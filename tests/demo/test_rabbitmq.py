"""What the demo reads from a real RabbitMQ."""

import json
from contextlib import closing

import pytest

from outbox import database, models
from outbox.brokers.base import Outgoing, SendStatus
from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.findings import BROKER_WEAK
from outbox.message import TopicSpec, TopicType
from project.demo.processes import DemoError
from project.demo.rabbitmq import RabbitMQ
from project.demo.report import Kills
from project.servers.rabbitmq import RabbitMQ as Server
from tests.factories import BatchFactory, TopicFactory
from tests.waiting import wait_until

READERS = {
    "orders": ["cart", "points", "shipment"],
    "order-cancellations": ["points"],
    "shipments": ["letters"],
}


@pytest.fixture(scope="class")
def demo(tmp_path_factory):
    """The broker of a demo, running."""
    if not Server.is_here():
        pytest.skip("There is no rabbitmq-server: apt-get install rabbitmq-server.")
    demo = RabbitMQ()
    with demo.run(tmp_path_factory.mktemp("demo")):
        yield demo


@pytest.fixture
def broker(demo):
    """The broker that the demo's processes have, its queues declared."""
    options = json.loads(demo.environment()["DEMO_RABBITMQ"])
    with closing(RabbitMQBroker("default", options, [TopicSpec(name, TopicType.NORMAL) for name in READERS])) as broker:
        assert not any(problem.id != BROKER_WEAK for problem in broker.check())  # it declares the queues, and says so
        yield broker


@pytest.mark.django_db
@pytest.mark.rabbitmq
class TestRabbitMQ:
    def test_carries_celerys_tasks_too(self, demo):
        environment = demo.environment()

        [node] = json.loads(environment["DEMO_RABBITMQ"])["NODES"]
        assert environment["CELERY_BROKER_URL"] == f"amqp://guest:guest@{node}//"

    def test_names_the_groups_so_that_none_misses_the_first_message(self, demo):
        options = json.loads(demo.environment()["DEMO_RABBITMQ"])

        assert {topic: sorted(groups) for topic, groups in options["GROUPS"].items()} == READERS

    def test_waits_for_copies_that_are_still_in_queues_and_shows_them(self, demo, broker):
        connection = database.raw("default")
        before = demo.count_open(connection, Kills())

        sent = broker.send([Outgoing("1", "orders", b"{}", key="536365"), Outgoing("1", "orders", b"{}", key="536365")])
        demo.show(connection)

        assert {one.status for one in sent} == {SendStatus.ACCEPTED}
        assert before == 0
        assert wait_until(lambda: demo.count_open(connection, Kills()) == 6)  # for each of three groups
        assert connection.execute("SELECT * FROM demo_visible").fetchall() == [("1", "536365")] * 2

    def test_is_killed_when_it_has_enough_messages_for_dead_consumers(self, demo, broker):
        kill = demo.plan_kill(database.raw("default"))
        batch = BatchFactory(topic=TopicFactory(name="orders"), size=5, sent=True)

        wait_until(lambda: kill.is_due(["cart", "points"]))  # five for each

        assert not kill.is_due(["cart"])
        models.Inbox.objects.create(
            consumer_group="cart", idempotency_key="1", message_id=batch.message_ids[0], topic="orders", delivery_count=1
        )
        assert not kill.is_due(["cart", "points"])


class TestWithoutAServer:
    def test_says_what_to_install(self, monkeypatch, tmp_path):
        monkeypatch.setattr(Server, "command", "a-rabbitmq-server-that-nobody-has")

        with pytest.raises(DemoError, match="apt-get install rabbitmq-server"), RabbitMQ().run(tmp_path):
            pass
