"""Profile rocketmq: a real RocketMQ set up by docker/rocketmq, and the services of the shop as processes on it."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from django.conf import settings

from project.servers.rocketmq import RocketMQ
from project.servers.rocketmq_ports import Ports
from tests.docker import compose
from tests.docker.compose import DOCKER
from tests.docker.machine import Machine, wait_for_letter
from tests.docker.test_services import order
from tests.waiting import wait_until

pytestmark = [pytest.mark.rocketmq, pytest.mark.slow, pytest.mark.timeout(600)]

# Where the server is, and what it may use of this machine, is not the compose file's to say.
PLACES = {"listenPort", "haListenPort", "namesrvAddr", "storePathRootDir", "storePathCommitLog"}


@pytest.fixture(scope="module")
def server(folder):
    lines = (DOCKER / "rocketmq/broker.conf").read_text().splitlines()
    theirs = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    broker = {name: value for name, value in theirs.items() if name not in PLACES}
    jars = Path(settings.BASE_DIR) / "var/rocketmq"
    with RocketMQ(jars, Ports.free(), settings=broker, data=folder / "rocketmq") as server:
        yield server


@pytest.fixture(scope="module")
def machine(folder, database_url, server):
    places = {
        "postgresql://shop:0123456789abcdef@postgres:5432/shop": database_url,
        "redis://redis:6379/0": f"files://{folder}",
        "broker:8081": server.endpoints,
        "namesrv:9876": server.name_server,
    }
    found = Machine(folder, places, BROKER="rocketmq")
    found.run("migrate")
    return found


class TestBroker:
    @pytest.mark.parametrize("service", ["namesrv", "broker"])
    def test_is_healthy_where_it_listens_and_only_there(self, service, server):
        (_, *words) = compose.services()[service]["healthcheck"]["test"]
        here = {"9876": server.ports.namesrv, "8081": server.ports.grpc, "10911": server.ports.broker}

        def code(ports):
            command = words[-1]
            for there, port in ports.items():
                command = command.replace(f"/{there}", f"/{port}")
            return subprocess.run([*words[:-1], command], capture_output=True).returncode

        assert code(here) == 0
        assert code(dict.fromkeys(here, 1)) == 1


class TestShop:
    def test_gets_its_topics_and_groups_and_brings_an_order_to_its_letter(self, machine, books):
        first = machine.run("topics")
        again = machine.run("topics")

        assert re.search(r"topic +orders at \S+ +created +message.type=TRANSACTION", first)
        assert re.search(r"group +cart at \S+ +created +retryMaxTimes=1000000", first)
        assert "created" not in again
        with machine.running("checker", "web", "relay", "consumers"):
            assert order(machine, "600003") == 201
            wait_for_letter(books, "600003", seconds=150)
            wait_until(lambda: json.loads(machine.get("/outbox/health/"))["status"] == "ok", 60)

    def test_gets_no_topics_where_its_broker_is_another(self, machine, folder):
        embedded = Machine(folder, {}, BROKER="embedded")

        with pytest.raises(AssertionError, match="Set BROKER beside the profile"):
            embedded.run("topics")
