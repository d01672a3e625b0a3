"""
The client: an event loop in a dedicated thread, a gRPC channel per proxy, a connection per broker, and the routes of topics.

Each `RocketMQBroker` has its own client, created after any fork, because gRPC's threads do not survive one.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import grpc

from outbox.brokers.rocketmq import loops
from outbox.brokers.rocketmq.endpoints import Endpoint, Queue
from outbox.brokers.rocketmq.errors import StatusError
from outbox.brokers.rocketmq.options import RocketMQOptions
from outbox.brokers.rocketmq.remoting.client import RemotingClient
from outbox.brokers.rocketmq.remoting.connection import NotConnected
from outbox.brokers.rocketmq.remoting.frames import RemotingError
from outbox.brokers.rocketmq.routes import Routes
from outbox.brokers.rocketmq.statuses import NO_BROKERS
from outbox.brokers.rocketmq.stubs import Code, MessagingServiceStub, definition, service
from outbox.errors import BrokerUnavailable

I = TypeVar("I")  # noqa: E741
T = TypeVar("T")

# gRPC must not retry, since each retry would store another half message. After an outage, it reconnects within a second
# instead of minutes.
CHANNEL_OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

GRACE_SECONDS = 30.0  # how long calls in progress may continue on a channel that is being replaced

CLIENT_VERSION = version("rocketmq-python-client")


class RocketMQClient:
    """
    Runs coroutines in its event loop's thread, and provides channels, routes and signatures.

    Args:
        now: returns seconds since 1970, for signatures.
        topics: the names of the broker's topics in settings.
    """

    def __init__(self, options: RocketMQOptions, now: Callable[[], float] = time.time, topics: Iterable[str] = ()) -> None:
        self.options = options
        self.topics = sorted(topics)
        self._now = now
        self.timeout = options.request_timeout.total_seconds()
        self.access_point = Endpoint.parse(options.endpoints)
        self.client_id = f"{socket.gethostname()}@{os.getpid()}@{uuid4().hex[:12]}"
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self.routes = Routes(self._ask_for_route)
        self.remoting = RemotingClient(options)
        self._stubs: dict[str, tuple[Any, Any]] = {}  # target -> channel, stub
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._indexes = itertools.count()
        self._metadata: dict[str, tuple[int, grpc.aio.Metadata]] = {}  # role -> second of the signature, signed metadata

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """
        Run a coroutine and return its result. May be called from any thread but the loop's.

        Raises:
            BrokerUnavailable: the client is closed, or was closed during the call.
        """
        try:
            with self._lock:  # a concurrent `close` would release the loop, and another client may then use it
                running = asyncio.run_coroutine_threadsafe(work, self._open_loop())
        except BaseException:
            work.close()
            raise
        try:
            return running.result()
        except CancelledError as error:
            raise BrokerUnavailable("The RocketMQ broker was closed during a call.") from error

    async def pipelined(self, items: Sequence[I], act: Callable[[I], Awaitable[T]]) -> list[T]:
        """Call a function for all items, at most IN_FLIGHT at the same time. Return the results in order."""
        results: dict[int, T] = {}
        remaining = iter(enumerate(items))

        async def work() -> None:
            for index, item in remaining:
                results[index] = await act(item)

        await asyncio.gather(*[work() for _ in range(min(self.options.in_flight, len(items)))])
        return [results[index] for index in range(len(items))]

    async def brokers(self) -> list[str]:
        """
        Return host:port of each broker that has one of the topics.

        Raises:
            NotConnected: no name server answers, or none knows a broker, since name servers omit brokers that are down.
        """
        addresses: dict[str, str] = dict(self.options.broker_addresses)
        for topic in self.topics:
            addresses |= await self.remoting.addresses(topic)
        if not addresses and not await self.remoting.has_brokers():
            raise NotConnected("No name server knows a broker.")
        return [addresses[name] for name in sorted(addresses)]

    async def ask_brokers(self, ask: Callable[[str], Awaitable[Sequence[T]]]) -> list[T]:
        """Call a function for every broker, and join its results. Raises BrokerUnavailable if a broker does not answer."""
        results: list[T] = []
        try:
            for broker in await self.brokers():
                results.extend(await ask(broker))
        except (ConnectionError, RemotingError) as error:
            raise BrokerUnavailable(f"A RocketMQ broker does not answer at its remoting port: {error}") from error
        return results

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background. Call it only in the loop's thread."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps weak references only
        task.add_done_callback(self._tasks.discard)

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop, which is started at the first call. Raises BrokerUnavailable if the client is closed."""
        with self._lock:
            return self._open_loop()

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        if self._pid != os.getpid():
            raise RuntimeError("This RocketMQ broker was created before a fork. Create one in the process that uses it.")
        if self._is_closed:
            raise BrokerUnavailable("The RocketMQ broker is closed.", hint="Create another one.")
        if self._loop is None:
            self._loop = loops.acquire()
        return self._loop

    def stub(self, endpoint: Endpoint) -> Any:
        """Return the gRPC stub of an endpoint. Call it only in the loop's thread."""
        if endpoint.target not in self._stubs:
            if self.options.tls:
                authorities = Path(self.options.tls_ca_file).read_bytes() if self.options.tls_ca_file else None
                channel = grpc.aio.secure_channel(endpoint.target, grpc.ssl_channel_credentials(authorities), CHANNEL_OPTIONS)
            else:
                channel = grpc.aio.insecure_channel(endpoint.target, CHANNEL_OPTIONS)
            self._stubs[endpoint.target] = channel, MessagingServiceStub(channel)
        return self._stubs[endpoint.target][1]

    async def call(self, endpoint: Endpoint, name: str, request: Any, *, role: str = "") -> Any:
        """
        Make one call, without retries.

        Args:
            role: a suffix of the client id: the server's group for consumers, and empty for producers. The proxy sends its
                commands only to the newest session of a client id.

        Raises:
            StatusError: the status of the answer is not OK.
            grpc.aio.AioRpcError: there was no answer.
        """
        stub = self.stub(endpoint)
        try:
            answer = await getattr(stub, name)(request, metadata=self.metadata(role), timeout=self.timeout)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._replace_channel(endpoint, stub)
            raise
        if answer.status.code not in (Code.OK, Code.MULTIPLE_RESULTS):
            raise StatusError(answer.status)
        return answer

    def _replace_channel(self, endpoint: Endpoint, stub: Any) -> None:
        """Drop a channel, so that the next call opens a new one. A dead connection may otherwise go unnoticed for minutes."""
        channel, current = self._stubs.get(endpoint.target, (None, None))
        if current is stub:
            del self._stubs[endpoint.target]
            self.start_task(channel.close(GRACE_SECONDS))

    async def _ask_for_route(self, topic: str) -> list[Queue]:
        """
        Ask the proxy for a topic's queues, unless the name servers know no broker.

        A proxy that is asked while its broker starts would cache for 20 s that there is no such topic.
        """
        if not await self.remoting.has_brokers():
            raise StatusError(definition.Status(code=Code.TOPIC_NOT_FOUND, message=NO_BROKERS))
        request = service.QueryRouteRequest(topic=self.resource(topic), endpoints=self.access_point.proto)
        return Queue.all_of(await self.call(self.access_point, "QueryRoute", request))

    def next_index(self) -> int:
        """Return the next number of a counter, by which callers choose in turn (round robin)."""
        return next(self._indexes)

    def resource(self, name: str) -> Any:
        """Return the name of a topic or group with its namespace."""
        return definition.Resource(name=name, resource_namespace=self.options.namespace)

    def metadata(self, role: str = "") -> grpc.aio.Metadata:
        """Return the metadata of a request. Its signature, which contains the time in seconds, is cached for that second."""
        second = int(self._now())
        known = self._metadata.get(role)
        if known is None or known[0] != second:
            at = datetime.fromtimestamp(second, UTC).strftime("%Y%m%dT%H%M%SZ")
            known = self._metadata[role] = second, self._sign(at, f"{self.client_id}@{role}" if role else self.client_id)
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
            # Source: apache/rocketmq-clients, Signature: only the time is signed.
            signature = hmac.new(options.secret_key.encode(), at.encode(), hashlib.sha1).hexdigest()
            headers.append(
                (
                    "authorization",
                    f"MQv2-HMAC-SHA1 Credential={options.access_key}, SignedHeaders=x-mq-date-time, Signature={signature}",
                )
            )
        return grpc.aio.Metadata(*headers)

    def call_soon(self, act: Callable[[], object]) -> None:
        """Call a function in the loop's thread, if the loop runs. May be called from any thread."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(act)

    def close(self) -> None:
        """Cancel running tasks, close all connections and release the loop. A second call does nothing."""
        with self._lock:
            loop, self._loop = self._loop, None
            self._is_closed = True
        if loop is not None and self._pid == os.getpid():
            asyncio.run_coroutine_threadsafe(self._close(), loop).result(10)
            loops.release(loop)

    async def _close(self) -> None:
        this_task = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not this_task]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.remoting.close()
        for channel, _ in self._stubs.values():
            await channel.close()
        self._stubs.clear()
