"""`outbox_topics` on real Kafkas: what is created, what is different, and what a cluster refuses."""

import json
import tempfile
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewPartitions, ResourceType
from django.core.management import call_command

from outbox import consumer, database
from outbox.brokers.base import ServerResource
from outbox.brokers.kafka.broker import KafkaBroker
from outbox.brokers.kafka.marker import marker_topic
from outbox.database.identity import read_identity
from outbox.errors import BrokerMisconfigured
from outbox.message import TopicSpec, TopicType
from outbox.relay.rounds import Relay
from project.servers.kafka import Kafka
from tests.commands import run as run_command
from tests.factories import MessageRowFactory, TicketFactory, TopicFactory
from tests.kafka_node import JARS, server
from tests.outbox.brokers.kafka import cluster, secured
from tests.outbox.brokers.kafka.secured import CREATE, DESCRIBE
from tests.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

LANES = 16


def new_name() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"


def resources(broker: KafkaBroker, *, source: str = "") -> dict[str, ServerResource]:
    found = broker.list_resources(sources=[source or cluster.new_source()], lanes=LANES, readers=())
    return {one.kind: one for one in found}


def open_with(*topics: TopicSpec) -> KafkaBroker:
    return KafkaBroker("default", {"SERVERS": [server().address]}, topics)


def settings_of(topic: str) -> dict[str, str]:
    admin = AdminClient({"bootstrap.servers": server().address, **cluster.QUIET})
    [found] = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
    return {name: one.value for name, one in found.result(cluster.SECONDS).items()}


class TestTopics:
    def test_have_the_partitions_and_the_retention_of_settings(self):
        topic = TopicSpec(new_name(), TopicType.NORMAL, queues=3, retention=timedelta(days=2))
        broker = open_with(topic)

        resources(broker)["topic"].create()

        found = resources(broker)["topic"]
        assert found.wanted == {"partitions": "3", "retention.ms": "172800000"}
        assert (found.exists, found.differences, found.trouble) == (True, (), "")
        assert settings_of(topic.name)["retention.ms"] == "172800000"

    def test_with_fewer_partitions_and_another_retention_are_different(self):
        topic = cluster.create_topic(partitions=2, config={"retention.ms": "-1"})

        found = resources(cluster.open_broker(topic))["topic"]

        assert found.differences == ("2 partitions, not 4", "retention.ms=-1, not 604800000")

    @pytest.mark.django_db(transaction=True)
    def test_that_keep_order_get_partitions_only_while_nothing_of_them_waits(self):
        topic = cluster.create_topic(partitions=1)
        row = TopicFactory(name=topic, type="fifo", ordered=True)
        broker = cluster.open_broker(topic, kind=TopicType.FIFO)
        relay = Relay(database.raw("default"), broker, 1)
        trouble = resources(broker)["topic"].trouble

        def publish(number: int) -> None:
            for key in "abcdef":
                message = MessageRowFactory(topic=row, key=key, body=b"%d" % number)
                TicketFactory(topic=row, message=message, order_key=ord(key))

        publish(1)
        relay.drain()
        call_command("outbox_pause", topic, database=["default"], stdout=StringIO())
        publish(2)
        relay.drain()
        waiting = len(cluster.read(topic))  # the group reads these
        admin = AdminClient({"bootstrap.servers": server().address, **cluster.QUIET})
        admin.create_partitions([NewPartitions(topic, 4)])[topic].result(cluster.SECONDS)
        call_command("outbox_pause", topic, database=["default"], resume=True, stdout=StringIO())
        wait_until(lambda: relay.drain().sent)

        assert "Set QUEUES to 1; or run outbox_pause" in trouble
        assert "give it 4 partitions" in trouble
        assert waiting == 6
        assert len(cluster.read(topic)) == 12
        assert (resources(broker)["topic"].differences, resources(broker)["topic"].trouble) == ((), "")

    def test_with_more_partitions_or_compaction_are_what_the_topic_needs(self):
        topic = cluster.create_topic(partitions=6, config={"retention.ms": "1", "cleanup.policy": "compact"})

        assert resources(cluster.open_broker(topic))["topic"].differences == ()


class TestMarkerTopics:
    def test_are_as_a_relay_creates_them(self):
        source = cluster.new_source()
        cluster.open_broker().open_lane(source, 1)

        found = resources(cluster.open_broker(), source=source)["marker topic"]

        assert (found.exists, found.differences) == (True, ())
        assert found.wanted["partitions"] == "32"

    def test_of_another_form_are_different(self):
        source = cluster.new_source()
        cluster.create_topic(marker_topic(source), partitions=4, config={"cleanup.policy": "delete"})

        found = resources(cluster.open_broker(), source=source)["marker topic"]

        assert found.differences == ("4 partitions, not 17", "cleanup.policy=delete, not compact")

    def test_are_not_needed_without_transactions(self):
        assert resources(cluster.open_broker(TRANSACTIONS=False)) == {}


class TestPermissions:
    def test_to_see_a_topic_are_named_where_they_are_missing(self):
        topic = secured.create_topic()

        found = resources(secured.open_broker(topic))["topic"]

        assert found.exists is None
        assert found.trouble == "This user may not see it, or it does not exist. Allow this user Describe on it."

    def test_to_see_settings_are_named_where_they_are_missing(self):
        topic = secured.create_topic(partitions=4)
        secured.allow(topic, DESCRIBE)
        broker = secured.open_broker(topic)

        found = wait_until(lambda: _if_there(resources(broker)["topic"]))

        assert found.differences == ()
        assert "Allow this user DescribeConfigs" in found.trouble

    def test_to_create_a_topic_are_named_where_they_are_missing(self):
        topic = new_name()
        secured.allow(topic, DESCRIBE)
        broker = secured.open_broker(topic)
        missing = wait_until(lambda: _if_missing(resources(broker)["topic"]))

        with pytest.raises(BrokerMisconfigured) as refused:
            missing.create()

        assert f"Topic {topic!r} does not exist, and Kafka did not create it" in refused.value.message
        assert refused.value.hint == ("Allow this user Create on it, or create it with partitions=4, retention.ms=604800000.")

    def test_to_create_a_topic_are_enough(self):
        topic = new_name()
        secured.allow(topic, DESCRIBE, CREATE)
        broker = secured.open_broker(topic)

        wait_until(lambda: _if_missing(resources(broker)["topic"])).create()

        assert resources(broker)["topic"].exists

    def test_of_a_wrong_password_are_named(self):
        broker = secured.open_broker("orders", client=secured.login("relay", "wrong"))

        with pytest.raises(BrokerMisconfigured, match="Invalid username or password"):
            resources(broker)


def _if_there(one: ServerResource) -> ServerResource | None:
    return one if one.exists else None


def _if_missing(one: ServerResource) -> ServerResource | None:
    return one if one.exists is False else None


@pytest.fixture(scope="module")
def few_nodes() -> Iterator[Kafka]:
    """A node that is to create topics with three replicas, and is alone."""
    settings = {"default.replication.factor": "3"}
    with tempfile.TemporaryDirectory(prefix="outbox-kafka-") as folder, Kafka(Path(folder), jars=JARS, settings=settings) as node:
        yield node


@pytest.fixture
def run(settings: Any, no_consumers: None) -> Callable[..., tuple[dict[str, Any], int]]:
    """Run the command for a topic with a group on each of some servers; return what it says, and its exit code."""

    def run(*arguments: str, **servers: str) -> tuple[dict[str, Any], int]:
        backend = {"BACKEND": "outbox.brokers.kafka.KafkaBroker"}
        topics = {alias: f"{alias}-{uuid.uuid4().hex[:8]}" for alias in servers}
        settings.OUTBOX = {
            "BROKERS": {alias: {**backend, "OPTIONS": {"SERVERS": [address]}} for alias, address in servers.items()},
            "TOPICS": {topic: {"BROKER": alias, "TYPE": "normal"} for alias, topic in topics.items()},
            "CELERY_WAKEUP": False,
        }
        for topic in topics.values():
            consumer(topic=topic, group="cart")(lambda message, context: None)
        printed, code = run_command("outbox_topics", "--json", *arguments)
        return {one["broker"]: one for one in json.loads(printed)["brokers"]}, code

    return run


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestTheCommand:
    def test_creates_all_that_relays_and_consumers_need(self, run):
        found, code = run("--create", default=server().address)

        with database.connect("default") as connection:
            marker = marker_topic(read_identity(connection).source)
        resources = found["default"]["resources"]
        names = {one["name"] for one in resources}
        assert code == 0
        assert {one["state"] for one in resources} <= {"created", "there"}
        assert marker in names
        assert {one["kind"] for one in resources} == {"topic", "marker topic"}

    def test_names_topic_and_setting_that_a_cluster_refuses_and_creates_the_others(self, run, few_nodes):
        found, code = run("--create", default=server().address, narrow=few_nodes.address, away="127.0.0.1:1")

        assert code == 1
        assert {one["state"] for one in found["default"]["resources"]} <= {"created", "there"}
        assert {one["state"] for one in found["narrow"]["resources"]} == {"missing"}
        [trouble] = [one["trouble"] for one in found["narrow"]["resources"] if one["kind"] == "topic"]
        assert "does not exist, and Kafka did not create it" in trouble
        assert "lower the cluster's default.replication.factor" in trouble
        assert "Kafka could not look the topic" in found["away"]["troubles"][0]
