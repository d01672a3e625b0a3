"""
A real RabbitMQ on free ports. It ends with the process that started it.

    python -m project.servers.rabbitmq              # prints the URL for CELERY_BROKER_URL
    python -m project.servers.rabbitmq --nodes 3    # a cluster; prints a URL for each node

It does not touch a service of Debian's package: this is another node, with another name, other ports and another epmd.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from project.servers.program import HOST, Program, ProgramCluster, ServerError, free_port, tie

BIN = Path("/usr/lib/rabbitmq/bin")  # Debian's programs; its wrappers on PATH require the user rabbitmq
USERS = "rabbit_auth_backend_internal"  # the Erlang module for users and permissions
NAMES_SECONDS = 1.5  # a file that has not changed for this time has been flushed to disk

CONFIG = """
listeners.tcp.1 = {host}:{port}
log.console = true
log.console.level = warning
log.file = false
disk_free_limit.absolute = 50MB
"""

# A node that can reach only a minority of the cluster pauses until it can reach more, and its clients go to other nodes.
PAUSE_MINORITY = "cluster_partition_handling = pause_minority\n"

# A node that starts for the first time joins the cluster of the first one.
JOIN = """
cluster_formation.peer_discovery_backend = classic_config
cluster_formation.classic_config.nodes.1 = {first}
cluster_formation.classic_config.nodes.2 = {own}
"""


class RabbitMQ(Program):
    """
    One node, as a context manager.

    Args:
        home: the node's folder; a node that is started there again keeps its queues and messages.
        settings: additional lines of rabbitmq.conf.
        plugins: plugins that are enabled.
        erlang: additional arguments of the Erlang runtime.
        beside: a node whose cluster this one joins when it first starts. It shares that node's cookie and epmd.
    """

    command = str(BIN / "rabbitmq-server") if BIN.is_dir() else "rabbitmq-server"
    package = "rabbitmq-server"
    start_seconds = 120

    def __init__(
        self, home: Path, *, settings: str = "", plugins: Sequence[str] = (), erlang: str = "", beside: RabbitMQ | None = None
    ) -> None:
        super().__init__()
        self._home = home
        self._settings = settings
        self._plugins = plugins
        self._erlang = erlang
        self._beside = beside
        self._epmd_port: int = beside._epmd_port if beside else free_port()
        self._distribution_port = free_port()
        self._epmd: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """The address for clients: host:port."""
        return f"{HOST}:{self.port}"

    @property
    def name(self) -> str:
        """The node's name within a cluster."""
        return f"outbox{self.port}@localhost"

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"amqp://guest:guest@{HOST}:{self.port}//"

    def start(self) -> Self:
        """
        Start the node, after its epmd.

        Raises:
            ServerError: it did not start.
        """
        # Without an epmd, the node would start one that outlives it.
        if self._epmd is None and self._beside is None and shutil.which("epmd"):
            command = [*tie("TERM"), "epmd", "-port", str(self._epmd_port), "-address", HOST]
            self._epmd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return super().start()
        except ServerError:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the node, then its epmd."""
        super().stop()
        epmd, self._epmd = self._epmd, None
        if epmd is not None:
            epmd.kill()
            epmd.wait()

    def knows_after_crash(self, queue: str) -> bool:
        """
        Return whether a quorum queue would survive a crash of the node now.

        Only about half a second after a queue's declaration, the node writes to disk which log belongs to the queue. If it is
        killed before, it no longer finds the messages and elects no leader, and the queue accepts no messages until it is deleted
        (seen with 3.10).
        """
        [names] = self._home.glob("mnesia/*/quorum/*/names.dets")
        return f"%2F_{queue}".encode() in names.read_bytes() and time.time() - names.stat().st_mtime > NAMES_SECONDS

    def control(self, *arguments: str, program: str = "rabbitmqctl") -> str:
        """
        Run rabbitmqctl or another program of the package; return its output.

        Raises:
            CalledProcessError: it failed.
        """
        command = [str(BIN / program) if BIN.is_dir() else program, *arguments]
        environment = dict(self._environment(self._home))
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120)
        return done.stdout

    def call(self, function: str, *texts: str) -> None:
        """
        Call an Erlang function of the node. rabbitmqctl could do this, too, but takes a second of CPU to start.

        Raises:
            ServerError: the call failed.
        """
        call = f"{function}({', '.join(f'<<{json.dumps(text)}>>' for text in (*texts, 'acting user'))}).\n"
        node = ["-address", f"localhost:{self._distribution_port}", "-c", (self._home / ".erlang.cookie").read_text()]
        name = ["-h", f"call-{time.time_ns()}"]  # a new name for each call, since that of an open connection is refused
        done = subprocess.run(["erl_call", *node, *name, "-e"], input=call, capture_output=True, text=True, timeout=120)
        if done.stdout.strip() != "{ok, ok}":
            raise ServerError(f"{call}{done.stdout}{done.stderr}")

    def _make_home(self) -> Path:
        self._home.mkdir(exist_ok=True)
        join = JOIN.format(first=self._beside.name, own=self.name) if self._beside else ""
        (self._home / "rabbitmq.conf").write_text(CONFIG.format(host=HOST, port=self.port) + join + self._settings)
        (self._home / "enabled_plugins").write_text(f"[{','.join(self._plugins)}].\n")
        cookie = self._home / ".erlang.cookie"
        if not cookie.exists():
            cookie.write_text((self._beside._home / cookie.name).read_text() if self._beside else os.urandom(16).hex())
            cookie.chmod(0o400)
        return self._home

    def _arguments(self, home: Path) -> Sequence[str | Path]:
        return []

    def _environment(self, home: Path) -> Mapping[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))},
            "HOME": str(home),
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(home / "mnesia"),
            "RABBITMQ_LOG_BASE": str(home / "logs"),
            "RABBITMQ_PID_FILE": str(home / "pid"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(home / "generated"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"+S 2:2 +sbwt none {self._erlang}",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_CRASH_DUMP": str(home / "erl_crash.dump"),
            "RUNNING_UNDER_SYSTEMD": "true",  # the script replaces itself by the server (exec), which so gets the signals
        }

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as connection:
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return connection.recv(1) == b"\x01"  # a frame of type 1, a method: the server's greeting
        except OSError:
            return False


class Cluster(ProgramCluster[RabbitMQ]):
    """
    The nodes of a cluster, all on this machine, as a context manager.

    Args:
        home: the parent folder of the nodes' folders.
        count: number of nodes.
        erlang: as for RabbitMQ.
    """

    def __init__(self, home: Path, count: int, *, erlang: str = "") -> None:
        self.nodes = [RabbitMQ(home / "node-1", settings=PAUSE_MINORITY, erlang=erlang)]
        for number in range(2, count + 1):
            node = RabbitMQ(home / f"node-{number}", settings=PAUSE_MINORITY, erlang=erlang, beside=self.nodes[0])
            self.nodes.append(node)

    def start(self) -> Self:
        """
        Start all nodes, the first one before the others, which join its cluster.

        Raises:
            ServerError: one did not start or join; then all are stopped.
        """
        first, *others = self.nodes
        try:
            first.start()  # with the epmd of all
            for node in others:
                node.begin()
            for node in others:
                node.finish()
        except ServerError:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop all nodes, the first one last, since all use its epmd."""
        for node in reversed(self.nodes):
            node.stop()

    def part(self, node: RabbitMQ) -> None:
        """Separate a node from the others at once, like a network partition: neither side can reach the other."""
        self._set_cookies(node, "parted", "[erlang:disconnect_node(Node) || Node <- nodes()]")

    def heal(self, node: RabbitMQ) -> None:
        """Reconnect a separated node to all others at once, so that none reaches it before the rest."""
        others = ", ".join(f"'{one.name}'" for one in self._others(node))
        self._set_cookies(node, "erlang:get_cookie()", f"[net_kernel:connect_node(Node) || Node <- [{others}]]")

    def is_parted(self, node: RabbitMQ) -> bool:
        """
        Return whether no other node is connected to a node.

        Raises:
            CalledProcessError: another node does not answer.
        """
        return not any(node.name in other.control("eval", "nodes().") for other in self._others(node))

    def _set_cookies(self, node: RabbitMQ, cookie: str, then: str) -> None:
        """At a node, set the cookie for all others, without which they cannot connect; then evaluate Erlang there."""
        cookies = ", ".join(f"erlang:set_cookie('{one.name}', {cookie})" for one in self._others(node))
        node.control("eval", f"{cookies}, {then}.")

    def leader(self, queue: str) -> RabbitMQ:
        """
        Return the node with the leader of a quorum queue.

        Raises:
            LookupError: the queue has no leader.
        """
        for node in self.nodes:
            with suppress(subprocess.SubprocessError):
                rows = node.control("list_queues", "name", "leader", "--quiet", "--no-table-headers").splitlines()
                names = dict(row.split("\t", 1) for row in rows)
                return next(one for one in self.nodes if one.name == names.get(queue))
        raise LookupError(f"Queue {queue!r} has no leader.")

    def _others(self, node: RabbitMQ) -> list[RabbitMQ]:
        return [one for one in self.nodes if one is not node]


def main() -> None:
    """Run one node or a cluster until it is interrupted, in a temporary folder."""
    parser = argparse.ArgumentParser(description="Run RabbitMQ until Ctrl-C; print a URL for each node.")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes of the cluster (default: 1)")
    count = parser.parse_args().nodes
    with tempfile.TemporaryDirectory(prefix="rabbitmq-") as folder:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        with Cluster(Path(folder), count) as cluster, suppress(KeyboardInterrupt):
            for node in cluster.nodes:
                print(node.url, flush=True)  # noqa: T201
            cluster.nodes[0].wait()


if __name__ == "__main__":
    main()
