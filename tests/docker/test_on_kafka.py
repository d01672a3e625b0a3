"""Profile kafka: a real Kafka set up by docker/kafka, and the services of the shop as processes on it."""

import pytest

from outbox.brokers.kafka import KafkaBroker
from outbox.brokers.kafka.server_checks import ONE_NODE
from outbox.message import TopicSpec, TopicType
from project.servers import kafka
from project.servers.kafka import Kafka
from tests.docker import compose
from tests.docker.compose import DOCKER
from tests.docker.machine import Machine, wait_for_letter
from tests.docker.test_services import order
from tests.kafka_node import JARS

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

# Where the server is, is not the compose file's to say.
PLACES = {"listeners", "advertised.listeners", "controller.quorum.voters", "log.dirs"}


def settings():
    """Read the lines of name=value that are mounted."""
    lines = (DOCKER / "kafka/server.properties").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def server(folder):
    ours = {name: value for name, value in settings().items() if name not in PLACES}
    with Kafka(folder / "kafka", jars=JARS, settings=ours) as server:
        yield server


@pytest.fixture(scope="module")
def machine(folder, database_url, server):
    places = {
        "postgresql://shop:0123456789abcdef@postgres:5432/shop": database_url,
        "redis://redis:6379/0": f"files://{folder}",
        "kafka:9092": server.address,
    }
    found = Machine(folder, places, BROKER="kafka")
    found.run("migrate")
    return found


class TestServer:
    def test_is_set_up_as_tests_set_it_up(self):
        ours, theirs = settings(), kafka.SETTINGS

        assert {name for name in ours.keys() & theirs if ours[name] != theirs[name]} == set()
        # A cluster of tests has few partitions, a small heap, notices soon that a node is gone, and is patient on a busy machine.
        assert theirs.keys() - ours == {
            "offsets.topic.num.partitions",
            "transaction.state.log.num.partitions",
            "log.cleaner.dedupe.buffer.size",
            "broker.heartbeat.interval.ms",
            "initial.broker.registration.timeout.ms",
        }

    def test_starts_with_the_file_that_is_mounted_and_keeps_its_data_on_the_volume(self):
        service = compose.services()["kafka"]

        assert "./kafka:/mnt/shared/config:ro" in service["volumes"]
        assert f"kafka:{settings()['log.dirs']}" in service["volumes"]

    def test_is_found_by_the_shop_and_by_nobody_else(self):
        shop, service = compose.of_the_shop()["relay"]["environment"], compose.services()["kafka"]
        found = settings()

        assert shop["KAFKA_SERVERS"] == f"{service['hostname']}:9092"
        assert found["advertised.listeners"] == f"PLAINTEXT://{shop['KAFKA_SERVERS']}"
        assert found["controller.quorum.voters"] == f"{found['node.id']}@{service['hostname']}:9093"
        assert found["listeners"] == "PLAINTEXT://:9092,CONTROLLER://:9093"
        assert "/127.0.0.1/9092" in service["healthcheck"]["test"][-1]
        assert "ports" not in service


class TestShop:
    def test_gets_its_topics_and_brings_an_order_to_its_letter(self, machine, server, books):
        created = machine.run("topics")
        again = machine.run("topics")
        broker = KafkaBroker("kafka", {"SERVERS": [server.address]}, [TopicSpec("orders", TopicType.NORMAL)])
        problems = broker.check()
        broker.close()

        assert "created" in created
        assert "created" not in again
        assert [problem.text for problem in problems] == [ONE_NODE]
        with machine.running("web", "relay", "consumers"):
            assert order(machine, "600005") == 201
            wait_for_letter(books, "600005", seconds=150)
