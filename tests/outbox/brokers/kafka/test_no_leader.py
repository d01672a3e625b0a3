"""A relay on a real cluster, while a partition has no leader: what else there is to send is sent."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from outbox.errors import BrokerUnavailable
from outbox.ids import topic_number
from outbox.models import Batch, MessageState, State, Topic
from outbox.relay.hosts import RelayTarget, open_runner
from project.servers.kafka import Cluster, Kafka
from tests.factories import TicketFactory
from tests.kafka_node import JARS
from tests.outbox.brokers.kafka.cluster import QUIET, SECONDS, read
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.kafka, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

LAME, WHOLE = "lame", "whole"
TARGET = RelayTarget("default", "default")
MESSAGES = 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("nodes"), 3, jars=JARS) as cluster:
        admin = _admin(cluster)  # one that is thrown away gives no answer any more
        for created in admin.create_topics([NewTopic(LAME, 1, 1), NewTopic(WHOLE, 1, 3)]).values():
            created.result(SECONDS)
        yield cluster


@pytest.fixture
def leader(cluster: Cluster) -> Kafka:
    """Return the node with the only replica of the lame topic."""
    admin = _admin(cluster)

    def number() -> int:
        found: int = admin.list_topics(LAME, timeout=SECONDS).topics[LAME].partitions[0].leader
        return found

    wait_until(lambda: number() > 0, 30)
    return cluster.nodes[number() - 1]


def _admin(cluster: Cluster) -> AdminClient:
    return AdminClient({"bootstrap.servers": ",".join(cluster.addresses), **QUIET})


@contextmanager
def down(node: Kafka) -> Iterator[None]:
    node.kill()
    yield
    node.start()


@pytest.fixture
def relay(cluster: Cluster, settings) -> Callable[[], None]:
    """Return a function that relays for a second; an error ends it, as it ends a relay of `outbox_relay`."""
    backend = "outbox.brokers.kafka.KafkaBroker"
    settings.OUTBOX = {
        "BROKERS": {"default": {"BACKEND": backend, "OPTIONS": {"SERVERS": cluster.addresses}}},
        "TOPICS": {LAME: {}, WHOLE: {}},
    }

    def relay() -> None:
        try:
            with open_runner(TARGET, note="test") as runner:
                runner.run(at_most=timedelta(seconds=1))
        except BrokerUnavailable:
            time.sleep(0.1)

    return relay


def publish() -> None:
    for name in (LAME, WHOLE):
        topic, _ = Topic.objects.get_or_create(
            name=name, defaults={"id": topic_number(name), "broker": "default", "type": "normal"}
        )
        TicketFactory.create_batch(MESSAGES, topic=topic)


def sent(name: str) -> int:
    return MessageState.objects.filter(topic=name, state="sent").count()


class TestAPartitionWithoutALeader:
    def test_holds_its_topic_alone_though_its_open_transaction_cannot_end(self, relay, cluster, leader):
        publish()
        wait_until(lambda: relay() or sent(WHOLE) == sent(LAME) == MESSAGES, 60)

        with down(leader):  # the cluster notices some seconds later, so the first transaction may have messages of both
            publish()
            wait_until(lambda: relay() or sent(WHOLE) == 2 * MESSAGES, 90)
            wait_until(lambda: relay() or "has no leader" in (Batch.objects.exclude(state=State.SENT).get().last_error or ""), 60)
            held = sent(LAME)
        wait_until(lambda: relay() or sent(LAME) == 2 * MESSAGES, 60)

        assert held == MESSAGES
        for topic in (LAME, WHOLE):
            ids = [dict(record.headers())["ce_id"] for record in read(topic, at=",".join(cluster.addresses))]
            assert len(ids) == len(set(ids)) == 2 * MESSAGES
