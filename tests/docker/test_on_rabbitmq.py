"""Profile rabbitmq: a real RabbitMQ set up by docker/rabbitmq, and the services of the shop as processes on it."""

import subprocess

import pytest

from outbox.brokers.rabbitmq import RabbitMQBroker
from outbox.brokers.rabbitmq.options import RabbitMQOptions
from outbox.message import TopicSpec, TopicType
from project.servers import rabbitmq
from project.servers.rabbitmq import RabbitMQ
from tests.docker import compose
from tests.docker.compose import DOCKER
from tests.docker.machine import Machine, wait_for_letter
from tests.docker.test_services import order

READERS = [("orders", "cart"), ("order-cancellations", "points"), ("shipments", "letters")]  # topics and one group of each

pytestmark = [pytest.mark.rabbitmq, pytest.mark.slow, pytest.mark.timeout(300)]


def settings(text):
    """Read lines of name = value."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split(" = ", 1) for line in lines)


def conf():
    return (DOCKER / "rabbitmq/rabbitmq.conf").read_text()


@pytest.fixture(scope="module")
def server(folder):
    if not RabbitMQ.is_here():
        pytest.skip("There is no rabbitmq-server: apt-get install rabbitmq-server.")
    user, password = (compose.services()["rabbitmq"]["environment"][f"RABBITMQ_DEFAULT_{name}"] for name in ("USER", "PASS"))
    with RabbitMQ(folder / "rabbitmq", settings=f"{conf()}default_user = {user}\ndefault_pass = {password}\n") as server:
        yield server


class TestServer:
    def test_is_set_up_as_tests_set_it_up(self):
        ours, theirs = settings(conf()), settings(rabbitmq.CONFIG)
        differ = {name for name in ours.keys() & theirs if ours[name] != theirs[name]}

        assert differ == {"disk_free_limit.absolute"}  # tests lose nothing when a disk is full
        assert {
            name for name in theirs.keys() - ours if not name.startswith("l")
        } == set()  # listeners and log are a machine's own
        assert ours["consumer_timeout"] == f"{RabbitMQOptions(nodes=[]).consumer_timeout.total_seconds() * 1000:.0f}"

    def test_starts_with_the_file_that_is_mounted_and_keeps_its_data_on_the_volume(self):
        service = compose.services()["rabbitmq"]

        assert "./rabbitmq/rabbitmq.conf:/etc/rabbitmq/conf.d/50-shop.conf:ro" in service["volumes"]
        assert "rabbitmq:/var/lib/rabbitmq" in service["volumes"]
        assert service["hostname"] == "rabbitmq"

    def test_is_found_by_the_shop_and_by_nobody_else(self):
        shop, service = compose.of_the_shop()["relay"]["environment"], compose.services()["rabbitmq"]

        assert shop["RABBITMQ_NODES"] == f"{service['hostname']}:5672"
        assert shop["RABBITMQ_USER"] == service["environment"]["RABBITMQ_DEFAULT_USER"]
        assert shop["RABBITMQ_PASSWORD"] == service["environment"]["RABBITMQ_DEFAULT_PASS"]
        assert "ports" not in service

    def test_has_no_guest_and_keeps_the_promises(self, server):
        shop = compose.of_the_shop()["relay"]["environment"]
        options = {"NODES": [server.address], "USER": shop["RABBITMQ_USER"], "PASSWORD": shop["RABBITMQ_PASSWORD"]}
        topics = [TopicSpec(topic, TopicType.NORMAL, groups=frozenset({name})) for topic, name in READERS]
        broker = RabbitMQBroker("rabbit", options, topics)

        problems = broker.check()
        broker.close()

        assert problems == []
        assert server.control("--quiet", "list_users").split("\n")[1:] == ["shop\t[administrator]", ""]

    def test_is_healthy_where_it_listens(self, server):
        (_, program, *arguments) = compose.services()["rabbitmq"]["healthcheck"]["test"]

        server.control(*arguments, program=program)
        server.control("stop_app")
        with pytest.raises(subprocess.CalledProcessError):
            server.control(*arguments, program=program)
        server.control("start_app")


class TestShop:
    def test_brings_an_order_to_its_letter(self, folder, database_url, server, books):
        places = {
            "postgresql://shop:0123456789abcdef@postgres:5432/shop": database_url,
            "redis://redis:6379/0": f"files://{folder}",
            "rabbitmq:5672": server.address,
        }
        machine = Machine(folder, places, BROKER="rabbitmq")
        machine.run("migrate")

        with machine.running("web", "relay", "consumers"):
            assert order(machine, "600004") == 201
            wait_for_letter(books, "600004", seconds=150)
