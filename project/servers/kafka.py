"""
A real Kafka on free ports. It ends with the process that started it.

    python -m project.servers.kafka              # prints its address
    python -m project.servers.kafka --nodes 3    # a cluster; prints the address of each node
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from project.servers.jars import are_programs_here, fetch_jars, java
from project.servers.program import HOST, Program, ProgramCluster, ServerError, free_port

POM = Path(__file__).with_name("kafka_pom.xml")
FOLDER = Path("var/kafka")
CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qg"
# A JVM that compiles less starts in half the time, and tests give it little work.
JAVA_FLAGS = ["-Xms256m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]

SETTINGS = {
    "process.roles": "broker,controller",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "log.cleaner.dedupe.buffer.size": "33554432",  # with the default, half of this heap, a node with many topics may not restart
    "broker.heartbeat.interval.ms": "500",
    "initial.broker.registration.timeout.ms": "120000",  # a node that has not joined its cluster by then ends; machines are busy
}

LOG_PROPERTIES = """
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d %p %m (%c)%n
rootLogger.level=WARN
rootLogger.appenderRef.out.ref=out
"""


class Kafka(Program):
    """
    One node, alone or a member of a cluster, as a context manager.

    Args:
        home: the node's folder; a node that is started there again keeps its topics and messages.
        jars: the folder of the server's jars, which are downloaded if they are missing.
        settings: additional lines of server.properties.
        number: the node's number in the cluster, from 1.
        voters: number -> the controller's address, of all nodes of the cluster; empty if the node is alone.
    """

    command = "java"
    package = "default-jre-headless maven"
    start_seconds = 120

    def __init__(
        self,
        home: Path,
        *,
        jars: Path = FOLDER / "lib",
        settings: Mapping[str, str] | None = None,
        number: int = 1,
        voters: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__()
        self._home = home
        self._jars = jars
        self._settings = settings or {}
        self._number = number
        self._voters = voters or {number: f"{HOST}:{free_port()}"}

    @classmethod
    def is_here(cls) -> bool:
        """Return whether Java and Maven are installed."""
        return are_programs_here()

    @property
    def address(self) -> str:
        """The address for clients: host:port."""
        return f"{HOST}:{self.port}"

    def _make_home(self) -> Path:
        fetch_jars(POM, self._jars)
        self._home.mkdir(exist_ok=True, parents=True)
        (self._home / "log4j2.properties").write_text(LOG_PROPERTIES)
        settings = self._home / "server.properties"
        settings.write_text("".join(f"{name}={value}\n" for name, value in self._all_settings().items()))
        if not (self._home / "data").exists():
            self._format(settings)
        return self._home

    def _all_settings(self) -> dict[str, str]:
        count = len(self._voters)
        replicas, in_sync = str(count), str(min(count, 2))
        listeners = f"PLAINTEXT://{self.address},CONTROLLER://{self._voters[self._number]}"
        return {
            **SETTINGS,
            "node.id": str(self._number),
            "controller.quorum.voters": ",".join(f"{number}@{address}" for number, address in self._voters.items()),
            "listeners": listeners,
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "log.dirs": str(self._home / "data"),
            "broker.session.timeout.ms": "2000" if count == 1 else "3000",
            "default.replication.factor": replicas,
            "min.insync.replicas": in_sync,
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": in_sync,
            **self._settings,
        }

    def _format(self, settings: Path) -> None:
        command = [
            java("Kafka"),
            "-cp",
            f"{self._jars}/*",
            "kafka.tools.StorageTool",
            "format",
            "-t",
            CLUSTER_ID,
            "-c",
            str(settings),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ServerError(f"Kafka's folder could not be formatted:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def _arguments(self, home: Path) -> Sequence[str | Path]:
        logging = f"-Dlog4j2.configurationFile={home / 'log4j2.properties'}"
        return [*JAVA_FLAGS, "-cp", f"{self._jars}/*", logging, "kafka.Kafka", home / "server.properties"]

    def _answers(self) -> bool:
        """Ask for the API versions of the node, which refuses connections until it has joined its cluster."""
        request = b"\x00\x12\x00\x00\x00\x00\x00\x01\x00\x06outbox"
        with suppress(OSError), socket.create_connection((HOST, self.port), timeout=2) as connection:
            connection.sendall(len(request).to_bytes(4, "big") + request)
            return len(connection.recv(4)) == 4
        return False


class Cluster(ProgramCluster[Kafka]):
    """
    The nodes of a cluster, all on this machine, as a context manager.

    Args:
        home: the parent folder of the nodes' folders.
        count: number of nodes.
        jars, settings: as for Kafka.
    """

    def __init__(self, home: Path, count: int, *, jars: Path = FOLDER / "lib", settings: Mapping[str, str] | None = None) -> None:
        voters = {number: f"{HOST}:{free_port()}" for number in range(1, count + 1)}
        self.nodes = [
            Kafka(home / f"node-{number}", jars=jars, settings=settings, number=number, voters=voters) for number in voters
        ]

    @property
    def addresses(self) -> list[str]:
        """The addresses of the nodes, for clients."""
        return [node.address for node in self.nodes]


def main() -> None:
    """Run one node or a cluster until it is interrupted, in a temporary folder."""
    parser = argparse.ArgumentParser(description="Run Kafka until Ctrl-C; print the address of each node.")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes of the cluster (default: 1)")
    count = parser.parse_args().nodes
    with tempfile.TemporaryDirectory(prefix="kafka-") as folder:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with Cluster(Path(folder), count) as cluster, suppress(KeyboardInterrupt):
            for address in cluster.addresses:
                print(address, flush=True)  # noqa: T201
            cluster.nodes[0].wait()


if __name__ == "__main__":
    main()
