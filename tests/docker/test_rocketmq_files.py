"""docker/rocketmq and the services of its profile agree with the RocketMQ that tests run, and with what the shop needs there."""

import json
import re

import pytest

from project.servers import rocketmq
from tests.docker import compose
from tests.docker.compose import DOCKER

pytestmark = pytest.mark.rocketmq


def settings(name):
    """Read a file of name=value lines."""
    lines = (DOCKER / "rocketmq" / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


class TestRocketMQ:
    PORTS = rocketmq.Ports()

    def test_listens_where_tests_have_it_listen(self):
        proxy = json.loads((DOCKER / "rocketmq/rmq-proxy.json").read_text())
        broker = settings("broker.conf")

        assert (proxy["grpcServerPort"], proxy["remotingListenPort"]) == (self.PORTS.grpc, self.PORTS.remoting)
        assert (broker["listenPort"], broker["haListenPort"]) == (str(self.PORTS.broker), str(self.PORTS.broker + 1))
        assert broker["namesrvAddr"] == proxy["namesrvAddr"] == f"namesrv:{self.PORTS.namesrv}"
        assert compose.services()["broker"]["ports"] == [
            f"127.0.0.1:{port}:{port}" for port in (self.PORTS.grpc, self.PORTS.broker)
        ]

    def test_is_found_by_shop_dashboard_and_broker(self):
        shop = compose.of_the_shop()["relay"]["environment"]
        dashboard = compose.services()["dashboard"]["environment"]["JAVA_OPTS"]
        broker = compose.services()["broker"]["command"]

        assert broker[broker.index("-n") + 1] == f"namesrv:{self.PORTS.namesrv}"
        assert shop["ROCKETMQ_ENDPOINTS"] == f"broker:{self.PORTS.grpc}"
        assert shop["ROCKETMQ_NAME_SERVERS"] == f"namesrv:{self.PORTS.namesrv}"
        assert dashboard == f"-Drocketmq.namesrv.addr=namesrv:{self.PORTS.namesrv}"

    def test_is_set_up_as_tests_set_it_up(self):
        ours, theirs = settings("broker.conf"), {name: str(value) for name, value in rocketmq.BROKER.items()}
        differ = {name for name in ours.keys() & theirs if ours[name] != theirs[name]}
        # A machine's own: small files, and addresses that only one host knows. Data that may be lost needs no disk.
        missing = {name for name in theirs.keys() - ours if not re.match(r"mapped|max|disk|transient|warm|timerFlush", name)}

        assert differ == {"flushDiskType"}
        assert missing == {"brokerIP1", "bindAddress"}

    def test_starts_with_the_files_that_are_mounted(self):
        broker = compose.services()["broker"]
        named = [word for word in broker["command"] if word.startswith("/")]

        assert "./rocketmq:/etc/rocketmq:ro" in broker["volumes"]
        assert named == ["/etc/rocketmq/broker.conf", "/etc/rocketmq/rmq-proxy.json"]
        assert all((DOCKER / path.removeprefix("/etc/")).exists() for path in named)

    def test_keeps_its_data_on_the_volume(self):
        broker = settings("broker.conf")

        assert f"rocketmq:{broker['storePathRootDir']}" in compose.services()["broker"]["volumes"]
        assert broker["storePathCommitLog"].startswith(f"{broker['storePathRootDir']}/")
        assert compose.services()["broker-folder"]["command"][-1] == broker["storePathRootDir"]
