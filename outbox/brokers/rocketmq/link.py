"""
The way to the server: an event loop in a thread of its own, a channel per endpoint, routes of topics.

One link serves one broker of one process. It is made after a fork: gRPC's threads do not survive one.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import itertools
import os
import socket
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, TypeVar
from uuid import uuid4

import grpc

from outbox.brokers.rocketmq.options import RocketMQOptions, address
from outbox.brokers.rocketmq.stubs import Code, MessagingServiceStub, definition, service

T = TypeVar("T")

ROUTE_SECONDS = 30.0

# No repeats by gRPC: each would be a half message of its own. Back quickly after an outage, not after minutes.
CHANNEL_OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
]

SCHEMES = {
    definition.AddressScheme.IPv4: "ipv4:",
    definition.AddressScheme.IPv6: "ipv6:",
    definition.AddressScheme.DOMAIN_NAME: "dns:",
}


WRITABLE = {definition.Permission.WRITE, definition.Permission.READ_WRITE}
CLIENT_VERSION = version("rocketmq-python-client")


class StatusError(Exception):
    """Raised when the server answers with a status that is not OK."""

    def __init__(self, status: Any) -> None:
        super().__init__(f"{status.code} {status.message}".strip())
        self.code = int(status.code)
        self.text = str(status.message)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One proxy, or one set of them behind a name. `target` is gRPC's name for it."""

    target: str
    proto: Any

    @classmethod
    def of(cls, proto: Any) -> Endpoint:
        """Read an endpoint as routes name it."""
        hosts = ",".join(sorted(f"{_bracketed(one.host)}:{one.port}" for one in proto.addresses))
        return cls(SCHEMES.get(proto.scheme, "dns:") + hosts, proto)

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read an endpoint as settings name it."""
        pairs = [address(one) for one in text.split(";")]
        proto = definition.Endpoints(
            scheme=_scheme(pairs[0][0]), addresses=[definition.Address(host=host, port=port) for host, port in pairs]
        )
        return cls.of(proto)


@dataclass(frozen=True, slots=True)
class Queue:
    """One queue of a topic, and the proxy that leads to it."""

    proto: Any
    endpoint: Endpoint
    is_writable: bool

    @classmethod
    def of(cls, proto: Any) -> Queue:
        """Read a queue as routes name it."""
        return cls(proto, Endpoint.of(proto.broker.endpoints), proto.permission in WRITABLE)


def _scheme(host: str) -> int:
    try:
        kind = ipaddress.ip_address(host).version
    except ValueError:
        return int(definition.AddressScheme.DOMAIN_NAME)
    return int(definition.AddressScheme.IPv4 if kind == 4 else definition.AddressScheme.IPv6)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Link:
    """Runs coroutines in a thread of its own, and gives them channels, routes and signatures."""

    def __init__(self, options: RocketMQOptions) -> None:
        self.options = options
        self.timeout = options.request_timeout.total_seconds()
        self.home = Endpoint.parse(options.endpoints)
        self.client_id = f"{socket.gethostname()}@{os.getpid()}@{uuid4().hex[:12]}"
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stubs: dict[str, tuple[Any, Any]] = {}
        self._routes: dict[str, tuple[float, list[Queue]]] = {}
        self._turns = itertools.count()
        self._signed: dict[str, tuple[int, grpc.aio.Metadata]] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, from any thread but the loop's."""
        return asyncio.run_coroutine_threadsafe(work, self.loop()).result()

    def loop(self) -> asyncio.AbstractEventLoop:
        """Give the loop, started at its first use."""
        if self._pid != os.getpid():
            raise RuntimeError("This RocketMQ broker was made before a fork. Make one in the process that uses it.")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="outbox-rocketmq", daemon=True).start()
        return self._loop

    def stub(self, endpoint: Endpoint) -> Any:
        """Give the calls of an endpoint. In the loop's thread only."""
        if endpoint.target not in self._stubs:
            if self.options.tls:
                channel = grpc.aio.secure_channel(endpoint.target, grpc.ssl_channel_credentials(), CHANNEL_OPTIONS)
            else:
                channel = grpc.aio.insecure_channel(endpoint.target, CHANNEL_OPTIONS)
            self._stubs[endpoint.target] = channel, MessagingServiceStub(channel)
        return self._stubs[endpoint.target][1]

    async def call(self, endpoint: Endpoint, name: str, request: Any, *, role: str = "") -> Any:
        """
        Make one call, once.

        Args:
            role: as which of our clients; the proxy keeps one session for each, and its answers go to the latest.

        Raises:
            StatusError: the answer is not OK.
            grpc.aio.AioRpcError: there is no answer.
        """
        method = getattr(self.stub(endpoint), name)
        answer = await method(request, metadata=self.metadata(role), timeout=self.timeout)
        if answer.status.code not in (Code.OK, Code.MULTIPLE_RESULTS):
            raise StatusError(answer.status)
        return answer

    async def route(self, topic: str) -> list[Queue]:
        """Give the queues of a topic, remembered for a while."""
        known = self._routes.get(topic)
        if known is None or known[0] < time.monotonic():
            request = service.QueryRouteRequest(topic=self.resource(topic), endpoints=self.home.proto)
            answer = await self.call(self.home, "QueryRoute", request)
            known = self._routes[topic] = time.monotonic() + ROUTE_SECONDS, [Queue.of(one) for one in answer.message_queues]
        return known[1]

    def forget_routes(self) -> None:
        """Ask for all routes again at their next use."""
        self._routes.clear()

    def next_turn(self) -> int:
        """Count up: whoever chooses among equals takes turns."""
        return next(self._turns)

    def resource(self, name: str) -> Any:
        """Name a topic or group as requests do."""
        return definition.Resource(name=name, resource_namespace=self.options.namespace)

    def metadata(self, role: str = "") -> grpc.aio.Metadata:
        """Give what each request says of its sender, signed by the second. gRPC would make this object for each call."""
        second = int(time.time())
        known = self._signed.get(role)
        if known is None or known[0] != second:
            at = datetime.fromtimestamp(second, UTC).strftime("%Y%m%dT%H%M%SZ")
            known = self._signed[role] = second, self._sign(at, f"{self.client_id}@{role}" if role else self.client_id)
        return known[1]

    def _sign(self, at: str, client_id: str) -> grpc.aio.Metadata:
        options = self.options
        headers = [
            ("x-mq-language", "PYTHON"),
            ("x-mq-protocol", "GRPC_V2"),
            ("x-mq-client-version", CLIENT_VERSION),
            ("x-mq-date-time", at),
            ("x-mq-client-id", client_id),
            ("x-mq-namespace", options.namespace),
        ]
        if options.access_key:
            # Source: apache/rocketmq-clients, Signature: MQv2-HMAC-SHA1 over the time alone.
            signature = hmac.new(options.secret_key.encode(), at.encode(), hashlib.sha1).hexdigest()
            headers.append(
                (
                    "authorization",
                    f"MQv2-HMAC-SHA1 Credential={options.access_key}, SignedHeaders=x-mq-date-time, Signature={signature}",
                )
            )
        return grpc.aio.Metadata(*headers)

    def close(self) -> None:
        """Close channels, end loop and thread."""
        loop, self._loop = self._loop, None
        if loop is not None and self._pid == os.getpid():
            asyncio.run_coroutine_threadsafe(self._close(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)

    async def _close(self) -> None:
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for channel, _ in self._stubs.values():
            await channel.close()
        self._stubs.clear()
