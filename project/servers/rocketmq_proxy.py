"""A separate gRPC proxy (cluster mode) for a node, which can be stopped while the broker is running."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from project.servers.program import HOST, ServerError
from project.servers.rocketmq_ports import Ports, serves_http2

if TYPE_CHECKING:  # that module imports this one
    from project.servers.rocketmq import RocketMQ

NAME = "proxy"
START_SECONDS = 300


class ClusterProxy:
    """
    A proxy for the broker of a node, or for all brokers of the node's cluster.

    Args:
        settings: additional settings of the proxy.
    """

    def __init__(self, node: RocketMQ, settings: dict[str, object] | None = None) -> None:
        self._node = node
        self._settings = settings or {}
        self._ports = Ports.free()
        self.endpoints = f"{HOST}:{self._ports.grpc}"

    def start(self) -> Self:
        """
        Start the proxy, and return when it accepts requests. If it finds no broker that answers, it ends, and is started again.

        Raises:
            ServerError: it did not accept requests within minutes.
        """
        settings: dict[str, object] = {
            "rocketMQClusterName": "DefaultCluster",
            "namesrvAddr": ";".join(self._node.name_servers),
            "grpcServerPort": self._ports.grpc,
            "remotingListenPort": self._ports.remoting,
            "proxyMode": "CLUSTER",
        }
        Path(self._node.conf("rmq-cluster-proxy.json")).write_text(json.dumps(settings | self._settings))
        arguments = ["org.apache.rocketmq.proxy.ProxyStartup", "-pm", "cluster", "-pc", self._node.conf("rmq-cluster-proxy.json")]
        deadline = time.monotonic() + START_SECONDS
        while True:
            self._node.spawn(NAME, ["-Xms64m", "-Xmx192m", "-XX:MaxDirectMemorySize=128m"], arguments)
            try:
                self._node.wait(NAME, lambda: serves_http2(self._ports.grpc))
            except ServerError:
                self.kill()
                if time.monotonic() > deadline:
                    raise
            else:
                return self

    @property
    def is_running(self) -> bool:
        return self._node.runs(NAME)

    def kill(self) -> None:
        """Kill the proxy with SIGKILL."""
        self._node.kill(NAME)
