"""
A real RocketMQ: a name server, and a process with broker and gRPC proxy. `make rocketmq` runs it until Ctrl-C.

    python -m project.servers.rocketmq --nodes 3    # three brokers, two name servers and a proxy in cluster mode

Its data are in a separate folder and may be lost, since it is stopped with SIGKILL: an orderly stop takes 20 s.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from outbox.brokers.rocketmq.group_checks import MIN_RETRIES
from outbox.brokers.rocketmq.options import parse_address
from outbox.brokers.rocketmq.remoting.frames import RemotingError
from outbox.message import TopicType
from project.servers.jars import fetch_jars, java
from project.servers.program import HOST, Child, ServerError, tie
from project.servers.remoting import call
from project.servers.rocketmq_admin import make_group, make_topic
from project.servers.rocketmq_ports import Ports, is_free, serves_http2
from project.servers.rocketmq_proxy import ClusterProxy

READY_SECONDS = 240
NAME_SERVERS = 2  # number of name servers of a cluster

UPDATE_BROKER_CONFIG, BROKER_CONFIG = 25, 26
ROUTE_OF_TOPIC, CLUSTER_INFO = 105, 106

FLAGS = [
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xss512k",
    *(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in ("jdk.internal.ref", "java.nio", "java.util", "java.lang")),
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    # Each listener would generate an RSA key for a self-signed certificate, which takes two thirds of the start. The proxy
    # requires one, so its key is short; the others generate none, unless a later flag says otherwise.
    "-Dtls.server.mode=disabled",
    "-Dio.grpc.netty.shaded.io.netty.handler.ssl.util.selfSignedKeyStrength=1024",
]

BROKER = {
    "brokerClusterName": "DefaultCluster",
    "brokerName": "broker-a",
    "brokerId": 0,
    "brokerIP1": HOST,
    "bindAddress": HOST,
    "flushDiskType": "ASYNC_FLUSH",
    "autoCreateTopicEnable": "false",
    "autoCreateSubscriptionGroup": "false",
    "enablePropertyFilter": "true",
    "recallMessageEnable": "true",
    "mappedFileSizeCommitLog": 67108864,
    "mappedFileSizeConsumeQueue": 300000,
    "mappedFileSizeTimerLog": 8388608,
    "maxHashSlotNum": 100000,
    "maxIndexNum": 400000,
    "transientStorePoolEnable": "false",
    "warmMapedFileEnable": "false",
    "diskMaxUsedSpaceRatio": 95,
    "messageIndexSafe": "true",  # the index of messages survives a kill
    # Record at once that a half message was committed or rolled back. By default this happens up to 3 s late, and the broker
    # sends check-backs about such half messages. The interval is never reached; with a short one, the thread that records
    # them loops without pause after the first one (5.5.0).
    "transactionOpMsgMaxSize": 1,
    "transactionOpBatchInterval": 3_600_000,
    # Another thread loops without pause until this interval has passed once; by default it is 10 s (5.5.0).
    "transactionMetricFlushInterval": 500,
    # By default each second, but the search for changes in the 40 MB of the timer wheel takes a fifth of a core.
    "timerFlushIntervalMs": 60_000,
}

POM = Path(__file__).with_name("rocketmq_pom.xml")

FAST_CHECKS = {"transactionTimeOut": 6000, "transactionCheckInterval": 1000, "transactionCheckMax": 100}


class RocketMQ:
    """
    One node.

    Args:
        folder: the folder of jars and data, which is created if it is missing.
        settings: additional settings of broker.conf.
        proxy: additional settings of rmq-proxy.json.
        flags: additional flags of both JVMs.
        keys: access key and secret key of an administrator, if the settings require signed requests.
        name_servers: the name servers of its cluster, which has a separate proxy; the one with this node's port is started
            with the node. Empty if the node is alone.
    """

    def __init__(
        self,
        folder: Path,
        ports: Ports | None = None,
        *,
        settings: dict[str, object] | None = None,
        proxy: dict[str, object] | None = None,
        data: Path | None = None,
        flags: Sequence[str] = (),
        keys: tuple[str, str] = ("", ""),
        name_servers: Sequence[str] = (),
    ) -> None:
        self.ports = ports or Ports()
        self.lib = folder / "lib"
        self.data = data or folder / "data"
        self.endpoints = f"{HOST}:{self.ports.grpc}"
        self.name_server = f"{HOST}:{self.ports.namesrv}"
        self.broker = f"{HOST}:{self.ports.broker}"
        self.broker_address = (HOST, self.ports.broker)
        self.name_servers = list(name_servers) or [self.name_server]
        self._has_proxy = not name_servers
        self._settings = settings or {}
        self._proxy = proxy or {}
        self._flags = flags
        self._keys = keys
        self._children: dict[str, Child] = {}
        self._lock: int | None = None
        self.ready_after = 0.0  # seconds that the start took, without the download of jars

    def start(self) -> Self:
        """
        Download missing jars, start both processes, and return when messages can be sent.

        Raises:
            ServerError: a program is missing, a port is in use, or a process did not start.
        """
        self.prepare()
        began = time.monotonic()
        try:
            self.start_namesrv()
            self.start_broker()
        except ServerError:
            self.stop()
            raise
        self.ready_after = time.monotonic() - began
        return self

    def prepare(self) -> None:
        """
        Download missing jars, and write the configuration.

        Raises:
            ServerError: Java or Maven is missing, or a port or the folder is in use.
        """
        java("RocketMQ")
        fetch_jars(POM, self.lib)
        self._lock_folder()
        if taken := [port for port in self.ports.all() if not is_free(port)]:
            raise ServerError(f"Ports {taken} are in use. Stop the programs that listen there, or choose other ports.")
        self._configure()

    def start_namesrv(self) -> None:
        """Start the name server and wait for it."""
        main = "org.apache.rocketmq.namesrv.NamesrvStartup"
        self.spawn("namesrv", ["-Xms32m", "-Xmx96m", "-XX:MaxDirectMemorySize=64m"], [main, "-c", self.conf("namesrv.conf")])
        self.wait("namesrv", lambda: call(parse_address(self.name_server), CLUSTER_INFO) is not None)

    def kill_namesrv(self) -> None:
        """Kill the name server. After a restart it knows a broker only when the broker has registered again."""
        self.kill("namesrv")

    def start_broker(self) -> None:
        """Start broker and proxy, and wait until they accept messages."""
        self.begin_broker()
        self.finish_broker()

    def begin_broker(self) -> None:
        """Start broker and proxy, without waiting."""
        main = ["org.apache.rocketmq.broker.BrokerStartup", "-c", self.conf("broker.conf")]
        if self._has_proxy:
            main = ["org.apache.rocketmq.proxy.ProxyStartup", "-pm", "local", "-n", self.name_server]
            main += ["-bc", self.conf("broker.conf"), "-pc", self.conf("rmq-proxy.json")]
        # Each thread that stores a message keeps 4 MB of direct memory, including those for ends of half messages.
        self.spawn("broker", ["-Xms128m", "-Xmx384m", "-XX:MaxDirectMemorySize=640m"], main)

    def finish_broker(self) -> None:
        """Wait until broker and proxy, started with `begin_broker`, accept messages."""
        self.wait("broker", self._is_ready)

    def kill_broker(self) -> None:
        """Kill broker and proxy with SIGKILL."""
        self.kill("broker")

    @contextmanager
    def frozen_broker(self) -> Iterator[None]:
        """Freeze broker and proxy with SIGSTOP for the time of the block."""
        self._children["broker"].freeze()
        try:
            yield
        finally:
            self._children["broker"].send(signal.SIGCONT)

    def set(self, name: str, value: object) -> None:
        """Change a setting of the running broker."""
        call(self.broker_address, UPDATE_BROKER_CONFIG, {}, f"{name}={value}\n".encode(), keys=self._keys)

    def make_topic(self, name: str, kind: TopicType, queues: int = 4) -> None:
        """Create a topic if it does not exist, and return when producers can find it."""
        make_topic(self.broker_address, name, kind, queues, keys=self._keys)
        self.wait("broker", lambda: self._is_listed(ROUTE_OF_TOPIC, {"topic": name}))

    def make_group(self, name: str, *, is_ordered: bool = False, retries: int = MIN_RETRIES) -> None:
        """Create a consumer group."""
        make_group(self.broker_address, name, is_ordered=is_ordered, retries=retries, keys=self._keys)

    def stop(self) -> None:
        """Kill both processes; the data may be lost."""
        for name in list(self._children):
            self.kill(name)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _lock_folder(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.data / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerError(f"Another RocketMQ is running in {self.data}. Stop it, or choose another folder.") from None

    def _configure(self) -> None:
        for name in ("conf", "store", "logs", "tmp"):
            (self.data / name).mkdir(exist_ok=True)
        namesrv = {
            "listenPort": self.ports.namesrv,
            "bindAddress": HOST,
            "rocketmqHome": self.data,
            "kvConfigPath": self.data / "store/kvConfig.json",
        }
        broker = {
            "listenPort": self.ports.broker,
            "haListenPort": self.ports.broker + 1,
            "namesrvAddr": ";".join(self.name_servers),
            "storePathRootDir": self.data / "store",
            "storePathCommitLog": self.data / "store/commitlog",
        }
        proxy = {
            "rocketMQClusterName": "DefaultCluster",
            "namesrvAddr": self.name_server,
            "grpcServerPort": self.ports.grpc,
            "remotingListenPort": self.ports.remoting,
            "proxyMode": "LOCAL",
        }
        Path(self.conf("namesrv.conf")).write_text(_lines(namesrv.items()))
        Path(self.conf("broker.conf")).write_text(_lines((BROKER | broker | self._settings).items()))
        Path(self.conf("rmq-proxy.json")).write_text(json.dumps(proxy | self._proxy))

    def conf(self, name: str) -> str:
        """Return the path of a configuration file."""
        return str(self.data / "conf" / name)

    def spawn(self, name: str, memory: Sequence[str], arguments: Sequence[str]) -> None:
        """Start a Java program of RocketMQ."""
        folders = [f"-Duser.home={self.data}", f"-Drocketmq.home.dir={self.data}", f"-Djava.io.tmpdir={self.data / 'tmp'}"]
        environment = {**os.environ, "ROCKETMQ_HOME": str(self.data), "RMQ_PROXY_HOME": str(self.data)}
        environment.pop("NAMESRV_ADDR", None)
        self._children[name] = Child(
            f"RocketMQ's {name} (its logs are in {self.data}/logs)",
            [*tie("KILL"), java("RocketMQ"), *memory, *FLAGS, *self._flags, *folders, "-cp", f"{self.lib}/*", *arguments],
            self.data / f"{name}.out",
            environment=environment,
            folder=self.data,  # for some files, RocketMQ always uses the working directory
        )

    def wait(self, name: str, is_ready: Callable[[], bool]) -> None:
        """
        Wait until a program is ready.

        Raises:
            ServerError: it has ended, or was not ready in time.
        """

        def answers() -> bool:
            with suppress(OSError, RemotingError):
                return is_ready()
            return False

        self._children[name].wait_for_answer(answers, READY_SECONDS)

    def _is_ready(self) -> bool:
        if not self._is_listed(CLUSTER_INFO):
            return False
        call(self.broker_address, BROKER_CONFIG, keys=self._keys)
        return not self._has_proxy or serves_http2(self.ports.grpc)

    def _is_listed(self, code: int, fields: dict[str, str] | None = None) -> bool:
        """Return whether the answers of all name servers to a request contain this broker's address."""
        return all(self.broker.encode() in call(parse_address(server), code, fields) for server in self.name_servers)

    def runs(self, name: str) -> bool:
        """Return whether a program is running."""
        return name in self._children and self._children[name].is_running

    def kill(self, name: str) -> None:
        """Kill a program with SIGKILL."""
        child = self._children.pop(name, None)
        if child is not None:
            child.kill()


class Cluster:
    """
    The masters of a cluster, all on this machine, as a context manager. A topic has queues on each of them.

    Args:
        folder: as for RocketMQ.
        count: number of brokers. The first two nodes also have a name server.
        settings: additional settings of each broker.conf.
        proxy: additional settings of the proxy.
        data: the parent folder of the nodes' data.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        settings: dict[str, object] | None = None,
        proxy: dict[str, object] | None = None,
        data: Path | None = None,
    ) -> None:
        ports = [Ports.free() for _ in range(count)]
        self.name_servers = [f"{HOST}:{node_ports.namesrv}" for node_ports in ports[:NAME_SERVERS]]
        self.nodes = [
            RocketMQ(
                folder,
                node_ports,
                settings={**(settings or {}), "brokerName": f"broker-{letter}"},
                data=(data or folder / "cluster") / letter,
                name_servers=self.name_servers,
            )
            for letter, node_ports in zip("abcdefghi", ports, strict=False)
        ]
        self.proxy = ClusterProxy(self.nodes[0], proxy)
        self.endpoints = self.proxy.endpoints
        self.ready_after = 0.0  # seconds that the start took, without the download of jars

    @property
    def named(self) -> list[RocketMQ]:
        """The nodes with a name server."""
        return self.nodes[:NAME_SERVERS]

    def start(self) -> Self:
        """
        Start name servers, brokers and proxy.

        Raises:
            ServerError: one did not start; then all are stopped.
        """
        try:
            for node in self.nodes:
                node.prepare()
            began = time.monotonic()
            for node in self.named:
                node.start_namesrv()
            for node in self.nodes:
                node.begin_broker()
            for node in self.nodes:
                node.finish_broker()
            self.proxy.start()
        except ServerError:
            self.stop()
            raise
        self.ready_after = time.monotonic() - began
        return self

    def make_topic(self, name: str, kind: TopicType, queues: int = 4) -> None:
        """Create a topic on each broker."""
        for node in self.nodes:
            node.make_topic(name, kind, queues)

    def make_group(self, name: str) -> None:
        """Create a consumer group on each broker."""
        for node in self.nodes:
            node.make_group(name)

    def stop(self) -> None:
        """Kill all processes; the data may be lost."""
        for node in reversed(self.nodes):
            node.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _lines(settings: Iterable[tuple[str, object]]) -> str:
    return "".join(f"{name}={value}\n" for name, value in settings)


def main() -> int:
    """Run a node or a cluster in the foreground."""
    parser = argparse.ArgumentParser(prog="make rocketmq ARGS=...", description="Run RocketMQ until Ctrl-C.")
    parser.add_argument("--folder", type=Path, default=Path("var/rocketmq"), help="default: %(default)s")
    parser.add_argument("--topic", action="append", default=[], metavar="NAME:TYPE", help="create this topic; may be repeated")
    parser.add_argument("--group", action="append", default=[], metavar="NAME", help="create this group; may be repeated")
    parser.add_argument("--fast-checks", action="store_true", help="send check-backs each second")
    parser.add_argument(
        "--nodes", type=int, choices=range(1, 10), default=1, help="number of brokers; several form a cluster on free ports"
    )
    parser.add_argument("--free-ports", action="store_true", help="use free ports instead of 9876, 8081, 8080 and 10911")
    options = parser.parse_args()
    settings: dict[str, object] = dict(FAST_CHECKS) if options.fast_checks else {}
    ports = Ports.free() if options.free_ports else Ports()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = options.folder.resolve()
    server: RocketMQ | Cluster = RocketMQ(folder, ports, settings=settings)
    if options.nodes > 1:
        server = Cluster(folder, options.nodes, settings=settings)
    try:
        server.start()
        for topic in options.topic:
            name, _, kind = topic.partition(":")
            server.make_topic(name, TopicType(kind or "transaction"))
        for group in options.group:
            server.make_group(group)
        nodes = server.nodes if isinstance(server, Cluster) else [server]
        brokers = ", ".join(node.broker for node in nodes)
        addresses = f"endpoints {server.endpoints}, name servers {', '.join(server.name_servers)}, brokers {brokers}"
        print(f"RocketMQ is ready after {server.ready_after:.0f} s: {addresses}. Ctrl-C ends it.", flush=True)  # noqa: T201
        signal.pause()
    except KeyboardInterrupt:
        pass
    except ServerError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
