"""A separate gRPC proxy (cluster mode) for a node, which can be down while the broker is up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from project.servers.program import HOST, ServerError
from project.servers.rocketmq_ports import Ports, serves_http2

if TYPE_CHECKING:  # a cluster there has one of these
    from project.servers.rocketmq import RocketMQ

NAME = "proxy"
START_SECONDS = 300


class ClusterProxy:
    """
    One proxy to the broker of a node, or to all of its cluster.

    Args:
        settings: of its own file, beside ours.
    """

    def __init__(self, node: RocketMQ, settings: dict[str, object] | None = None) -> None:
        self._node = node
        self._settings = settings or {}
        self._ports = Ports.free()
        self.endpoints = f"{HOST}:{self._ports.grpc}"

    def start(self) -> Self:
        """
        Start it, and return when it takes requests. One that finds no broker that answers ends, and is started again.

        Raises:
            ServerError: it does not take requests after minutes.
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
        """End it by SIGKILL."""
        self._node.kill(NAME)
