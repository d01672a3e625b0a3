"""
A real RocketMQ: name server, and broker with gRPC proxy in one process. `make rocketmq` runs it till Ctrl-C.

    python -m project.servers.rocketmq --nodes 3    # three brokers, two name servers and a proxy in cluster mode

Its data lie in a folder of their own and may be lost: it is stopped by SIGKILL, an orderly stop takes 20 s.
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
NAME_SERVERS = 2  # of a cluster

UPDATE_BROKER_CONFIG, BROKER_CONFIG = 25, 26
ROUTE_OF_TOPIC, CLUSTER_INFO = 105, 106

FLAGS = [
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xss512k",
    *(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in ("jdk.internal.ref", "java.nio", "java.util", "java.lang")),
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    # Each listener would first make an RSA key for a certificate of its own, which takes two thirds of the start. The proxy
    # cannot do without, so its key is short; the others make none unless a later flag says otherwise.
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
    "messageIndexSafe": "true",  # a broker that is killed keeps its index of messages
    # Ends of half messages are noted at once: not up to 3 s late, when the next check asks about a half that has ended.
    # The interval is never waited for, else the thread that notes them runs in circles from the first one on (5.5.0).
    "transactionOpMsgMaxSize": 1,
    "transactionOpBatchInterval": 3_600_000,
    # Another thread runs in circles till this has passed once: by default 10 s (5.5.0).
    "transactionMetricFlushInterval": 500,
    # Not each second: a fifth of a core goes into looking for what changed in the 40 MB of the timer wheel.
    "timerFlushIntervalMs": 60_000,
}

POM = Path(__file__).with_name("rocketmq_pom.xml")

FAST_CHECKS = {"transactionTimeOut": 6000, "transactionCheckInterval": 1000, "transactionCheckMax": 100}


class RocketMQ:
    """
    One node.

    Args:
        folder: holds jars and data; made where it is missing.
        settings: of broker.conf, beside ours.
        proxy: of rmq-proxy.json, beside ours.
        flags: of both Java machines, beside ours.
        keys: access key and secret key of an administrator, where the settings want requests signed.
        name_servers: of its cluster, whose proxy stands apart; it runs the one that has its port. Empty: it is alone.
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
        self.ready_after = 0.0  # seconds that the start took, the jars being there

    def start(self) -> Self:
        """Fetch what is missing, start both processes, return when messages can be sent. Raises ServerError."""
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
        """Fetch what is missing, and write the configuration. Raises ServerError."""
        java("RocketMQ")
        fetch_jars(POM, self.lib)
        self._take_folder()
        if taken := [port for port in self.ports.all() if not is_free(port)]:
            raise ServerError(f"Ports {taken} are in use. Stop what listens there, or choose others.")
        self._configure()

    def start_namesrv(self) -> None:
        """Start the name server and wait for it."""
        main = "org.apache.rocketmq.namesrv.NamesrvStartup"
        self.spawn("namesrv", ["-Xms32m", "-Xmx96m", "-XX:MaxDirectMemorySize=64m"], [main, "-c", self.conf("namesrv.conf")])
        self.wait("namesrv", lambda: call(parse_address(self.name_server), CLUSTER_INFO) is not None)

    def kill_namesrv(self) -> None:
        """End the name server by SIGKILL; one that is started again knows no broker until each has announced itself."""
        self.kill("namesrv")

    def start_broker(self) -> None:
        """Start broker and proxy and wait until they take messages."""
        self.begin_broker()
        self.finish_broker()

    def begin_broker(self) -> None:
        """Start broker and proxy, without waiting."""
        main = ["org.apache.rocketmq.broker.BrokerStartup", "-c", self.conf("broker.conf")]
        if self._has_proxy:
            main = ["org.apache.rocketmq.proxy.ProxyStartup", "-pm", "local", "-n", self.name_server]
            main += ["-bc", self.conf("broker.conf"), "-pc", self.conf("rmq-proxy.json")]
        # Each thread that stores a message keeps 4 MB of direct memory, those that end half messages at the port, too.
        self.spawn("broker", ["-Xms128m", "-Xmx384m", "-XX:MaxDirectMemorySize=640m"], main)

    def finish_broker(self) -> None:
        """Wait until broker and proxy that were begun take messages."""
        self.wait("broker", self._is_ready)

    def kill_broker(self) -> None:
        """End broker and proxy by SIGKILL, as a machine that loses its power would."""
        self.kill("broker")

    @contextmanager
    def frozen_broker(self) -> Iterator[None]:
        """Freeze broker and proxy by SIGSTOP for the time of the block."""
        self._children["broker"].freeze()
        try:
            yield
        finally:
            self._children["broker"].send(signal.SIGCONT)

    def set(self, name: str, value: object) -> None:
        """Change a setting of the running broker."""
        call(self.broker_address, UPDATE_BROKER_CONFIG, {}, f"{name}={value}\n".encode(), keys=self._keys)

    def make_topic(self, name: str, kind: TopicType, queues: int = 4) -> None:
        """Create a topic; nothing changes where it is there already. Returns when producers can find it."""
        make_topic(self.broker_address, name, kind, queues, keys=self._keys)
        self.wait("broker", lambda: self._is_named(ROUTE_OF_TOPIC, {"topic": name}))

    def make_group(self, name: str, *, is_ordered: bool = False, retries: int = MIN_RETRIES) -> None:
        """Create a consumer group."""
        make_group(self.broker_address, name, is_ordered=is_ordered, retries=retries, keys=self._keys)

    def stop(self) -> None:
        """End both processes; the data may be lost."""
        for name in list(self._children):
            self.kill(name)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _take_folder(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.data / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServerError(f"A RocketMQ runs in {self.data} already.") from None

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
        """Start a Java program of RocketMQ's."""
        folders = [f"-Duser.home={self.data}", f"-Drocketmq.home.dir={self.data}", f"-Djava.io.tmpdir={self.data / 'tmp'}"]
        environment = {**os.environ, "ROCKETMQ_HOME": str(self.data), "RMQ_PROXY_HOME": str(self.data)}
        environment.pop("NAMESRV_ADDR", None)
        self._children[name] = Child(
            f"RocketMQ's {name} (its logs are in {self.data}/logs)",
            [*tie("KILL"), java("RocketMQ"), *memory, *FLAGS, *self._flags, *folders, "-cp", f"{self.lib}/*", *arguments],
            self.data / f"{name}.out",
            environment=environment,
            folder=self.data,  # some of what it writes has no other place
        )

    def wait(self, name: str, is_ready: Callable[[], bool]) -> None:
        """Return when a program is ready. Raises ServerError."""

        def answers() -> bool:
            with suppress(OSError, RemotingError):
                return is_ready()
            return False

        self._children[name].wait_for_answer(answers, READY_SECONDS)

    def _is_ready(self) -> bool:
        if not self._is_named(CLUSTER_INFO):
            return False
        call(self.broker_address, BROKER_CONFIG, keys=self._keys)
        return not self._has_proxy or serves_http2(self.ports.grpc)

    def _is_named(self, code: int, fields: dict[str, str] | None = None) -> bool:
        """Return whether all name servers name this broker in their answers to a request."""
        return all(self.broker.encode() in call(parse_address(one), code, fields) for one in self.name_servers)

    def runs(self, name: str) -> bool:
        """Return whether a program runs."""
        return name in self._children and self._children[name].is_running

    def kill(self, name: str) -> None:
        """End a program by SIGKILL."""
        child = self._children.pop(name, None)
        if child is not None:
            child.kill()


class Cluster:
    """
    Masters of one cluster, all on this machine; leave the block to stop them. A topic has queues on each of them.

    Args:
        folder: as for RocketMQ.
        count: how many brokers. The first two have a name server beside them.
        settings: of each broker.conf, beside ours.
        proxy: of the proxy's file, beside ours.
        data: the folder of their data.
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
        self.name_servers = [f"{HOST}:{one.namesrv}" for one in ports[:NAME_SERVERS]]
        self.nodes = [
            RocketMQ(
                folder,
                one,
                settings={**(settings or {}), "brokerName": f"broker-{letter}"},
                data=(data or folder / "cluster") / letter,
                name_servers=self.name_servers,
            )
            for letter, one in zip("abcdefghi", ports, strict=False)
        ]
        self.proxy = ClusterProxy(self.nodes[0], proxy)
        self.endpoints = self.proxy.endpoints
        self.ready_after = 0.0  # seconds that the start took, the jars being there

    @property
    def named(self) -> list[RocketMQ]:
        """The nodes with a name server."""
        return self.nodes[:NAME_SERVERS]

    def start(self) -> Self:
        """Start all of it. Raises ServerError."""
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
        """End all of it; the data may be lost."""
        for node in reversed(self.nodes):
            node.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _lines(settings: Iterable[tuple[str, object]]) -> str:
    return "".join(f"{name}={value}\n" for name, value in settings)


def main() -> int:
    """Run a node in the foreground."""
    parser = argparse.ArgumentParser(prog="make rocketmq ARGS=...", description="Run a RocketMQ node till Ctrl-C.")
    parser.add_argument("--folder", type=Path, default=Path("var/rocketmq"), help="default: %(default)s")
    parser.add_argument("--topic", action="append", default=[], metavar="NAME:TYPE", help="create it; may be repeated")
    parser.add_argument("--group", action="append", default=[], metavar="NAME", help="create it; may be repeated")
    parser.add_argument("--fast-checks", action="store_true", help="ask about half messages each second")
    parser.add_argument("--nodes", type=int, choices=range(1, 10), default=1, help="brokers of a cluster, on free ports")
    parser.add_argument("--free-ports", action="store_true", help="listen where nobody does, not on 9876, 8081, 8080, 10911")
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
        where = f"endpoints {server.endpoints}, name servers {', '.join(server.name_servers)}, brokers {brokers}"
        print(f"RocketMQ is ready after {server.ready_after:.0f} s: {where}. Ctrl-C ends it.", flush=True)  # noqa: T201
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
