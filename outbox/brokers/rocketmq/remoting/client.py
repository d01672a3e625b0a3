"""
The client of the remoting protocol: the addresses of brokers, and a connection to each broker and name server.

A broker's address comes from OPTIONS["BROKER_ADDRESSES"], otherwise from a name server, which is asked again periodically and
after a broker did not answer.
"""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Callable, Iterable
from functools import partial

from outbox.brokers.rocketmq.options import RocketMQOptions, parse_address
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.connection import NoAnswer, NotConnected, RemotingConnection
from outbox.brokers.rocketmq.remoting.frames import RemotingAnswer, RemotingError, Request, StoredMessage
from outbox.brokers.rocketmq.routes import MISSING_SECONDS, RETRY_SECONDS, ROUTE_SECONDS
from outbox.brokers.rocketmq.singleflight import SingleFlight

MASTER = "0"
A_BROKER = b'"brokerName"'  # the JSON of a cluster contains this if it has a broker; it is read too often to be parsed
NUMBER_KEY = re.compile(rb"([{,])(\d+):")  # a key that is not quoted, so that the JSON is invalid

REFUSE_SECONDS = 1.0  # for this time after a failed connection attempt, requests fail at once; an attempt may take a full timeout
IDLE_SECONDS = 30.0  # a server that was not asked for longer than this may have been frozen meanwhile

# Address -> since when the server has answered every request of this process, and when it answered last.
_answering_since: dict[str, tuple[float, float]] = {}


class RemotingClient:
    """
    Sends requests to brokers and name servers. Use it only in the thread of one event loop.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, options: RocketMQOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        # topic -> (valid until, {broker: (when a name server last reported it, address)})
        self._known: dict[str, tuple[float, dict[str, tuple[float, str]]]] = {}
        self._name_servers = list(options.name_servers)  # the name server that answered last is the first
        self._connections: dict[str, RemotingConnection] = {}
        self._failed: dict[str, tuple[float, NotConnected]] = {}  # address -> when an attempt to connect failed, its error
        self._silent: set[str] = set()  # addresses of servers whose last request was not answered
        self._opening: SingleFlight[RemotingConnection] = SingleFlight()
        self._queries: SingleFlight[dict[str, str]] = SingleFlight()
        self._tls: ssl.SSLContext | None = None

    @property
    def is_configured(self) -> bool:
        """Whether OPTIONS has NAME_SERVERS or BROKER_ADDRESSES."""
        return bool(self._options.name_servers or self._options.broker_addresses)

    async def addresses(self, topic: str) -> dict[str, str]:
        """
        Return the brokers of a topic, including those that went down recently: name -> host:port of the master.

        Raises:
            NotConnected: no name server answers, and the topic's brokers are not cached.
        """
        if not self._options.name_servers:
            return dict(self._options.broker_addresses)
        valid_until, known = self._known.get(topic, (0.0, {}))
        if self._clock() >= valid_until:
            try:
                reported = await self._queries.join(topic, partial(self._ask_name_servers, topic))
            except NotConnected:
                if topic not in self._known:
                    raise
                reported = {}
            now = self._clock()
            # A name server omits a broker that is down. Keep its address for a while, and ask again soon if all are missing.
            known = {name: entry for name, entry in known.items() if now - entry[0] < MISSING_SECONDS}
            known |= {name: (now, address) for name, address in reported.items()}

            self._known[topic] = now + (ROUTE_SECONDS if reported else RETRY_SECONDS), known
        return {name: self._options.broker_addresses.get(name, address) for name, (_, address) in known.items()}

    async def has_brokers(self) -> bool:
        """Return whether the name servers know any broker; True if no name server answers."""
        try:
            return A_BROKER in await self._ask_for_cluster()
        except NotConnected:
            return True

    async def masters(self) -> dict[str, str]:
        """
        Return all brokers of the cluster: name -> host:port of the master. Without name servers, return those of OPTIONS.

        Raises:
            NotConnected: no name server answers, or none knows a broker.
        """
        if not self._options.name_servers:
            return dict(self._options.broker_addresses)
        cluster = json.loads(NUMBER_KEY.sub(rb'\1"\2":', await self._ask_for_cluster()))
        reported = _masters(cluster["brokerAddrTable"].values())
        if not reported:
            raise NotConnected("No name server knows a broker.")
        return {name: self._options.broker_addresses.get(name, address) for name, address in reported.items()}

    def invalidate(self, topic: str) -> None:
        """Ask the name servers for the brokers of a topic again when they are next needed."""
        if topic in self._known:
            self._known[topic] = 0.0, self._known[topic][1]

    async def connect(self, address: str) -> None:
        """Connect to the server at host:port now, so that the next request need not. Raises NotConnected."""
        await self._connection(address)

    async def ask(self, address: str, request: Request) -> RemotingAnswer:
        """
        Send a request to the server at host:port, and return the answer.

        Raises:
            NotConnected: the request was not sent.
            NoAnswer: the request was sent and not answered.
        """
        try:
            answer = await (await self._connection(address)).ask(request)
        except (NotConnected, NoAnswer) as error:
            _answering_since.pop(address, None)
            if isinstance(error, NoAnswer):
                self._silent.add(address)
            raise
        now = self._clock()
        since, last = _answering_since.get(address, (now, now))
        _answering_since[address] = (since if now - last < IDLE_SECONDS else now), now
        return answer

    async def find(self, address: str, topic: str, key: str) -> list[StoredMessage]:
        """Return the messages of a topic on a broker that have a key or id. Raises the errors of `ask`, and RemotingError."""
        return requests.found(await self.ask(address, requests.query(topic, key)), key)

    async def view(self, address: str, log_offset: int, wire_id: str) -> StoredMessage | None:
        """
        Return the message at an offset of a broker's log, if it has the given id, otherwise None.

        Raises the same errors as `ask`, and RemotingError.
        """
        stored = requests.viewed(await self.ask(address, requests.view(log_offset)))
        return stored if stored is not None and stored.properties.get("UNIQ_KEY") == wire_id else None

    def answering_for(self, address: str) -> float:
        """Return for how many seconds a server has answered every request of this process."""
        now = self._clock()
        return now - _answering_since.get(address, (now, now))[0]

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    async def _connection(self, address: str) -> RemotingConnection:
        """Return the connection to a server. Concurrent callers share one attempt to connect. Raises NotConnected."""
        known = self._connections.get(address)
        if known is not None and known.is_open:
            return known
        failed_at, error = self._failed.get(address, (float("-inf"), None))
        if error is not None and self._clock() - failed_at < REFUSE_SECONDS:
            raise NotConnected(str(error))
        return await self._opening.join(address, partial(self._reopen, address))

    async def _reopen(self, address: str) -> RemotingConnection:
        try:
            self._connections[address] = await self._open_and_probe(address)
        except NotConnected as error:
            self._failed[address] = self._clock(), error
            raise
        self._failed.pop(address, None)
        return self._connections[address]

    async def _open_and_probe(self, address: str) -> RemotingConnection:
        """
        Connect to a server. If it has not answered a request, first send it one that changes nothing and is cheap.

        The operating system of a frozen server still accepts connections. A message that is sent there may be stored when the
        server resumes, so without this check each retry could store one more copy.
        """
        connection = await self._open(address)
        if address in self._silent:
            try:
                await connection.ask(Request(requests.GET_BROKER_CONFIG))
            except NoAnswer as error:
                connection.close()
                raise NotConnected(f"{address} accepts connections, but does not answer.") from error
            self._silent.discard(address)
        return connection

    async def _open(self, address: str) -> RemotingConnection:
        options = self._options
        if options.broker_tls and self._tls is None:
            self._tls = ssl.create_default_context(cafile=options.tls_ca_file or None)
        host, port = parse_address(address)
        seconds = options.request_timeout.total_seconds()
        keys = options.access_key, options.secret_key
        return await RemotingConnection.open(host, port, seconds=seconds, keys=keys, tls=self._tls)

    async def _ask_for_cluster(self) -> bytes:
        """
        Ask one name server after the other for all brokers, until one knows a broker. Return JSON, in which some keys are
        numbers.

        A name server that has just started knows no broker until the brokers register with it, up to 30 s later.

        Raises:
            NotConnected: no name server answers.
        """
        reason, body = "OPTIONS has none", None
        for address in list(self._name_servers):  # a concurrent call may reorder them
            try:
                body = (await self.ask(address, Request(requests.GET_CLUSTER_INFO))).checked().body
            except (NotConnected, NoAnswer, RemotingError) as error:
                reason = str(error)
            else:
                if A_BROKER in body:
                    break
        if body is None:
            raise NotConnected(f"No name server returns the brokers: {reason}")
        return body

    async def _ask_name_servers(self, topic: str) -> dict[str, str]:
        """
        Ask one name server after the other, until one knows the topic, for the masters of its brokers.

        Raises:
            NotConnected: no name server answers with the route, or that the topic is missing.
        """
        reason, is_missing = "OPTIONS has none", False
        for address in list(self._name_servers):
            try:
                answer = await self.ask(
                    address, Request(requests.ROUTE_OF_TOPIC, {"topic": topic, "acceptStandardJsonOnly": True})
                )
                self._name_servers.sort(key=lambda other: other != address)
                return _masters(json.loads(answer.checked().body)["brokerDatas"])
            except RemotingError as error:
                is_missing = is_missing or error.code == requests.NO_SUCH_TOPIC
                reason = str(error)
            except (NotConnected, NoAnswer) as error:
                reason = str(error)
        if is_missing:
            return {}
        raise NotConnected(f"No name server returns the route of topic {topic}: {reason}")


def _masters(brokers: Iterable[dict[str, dict[str, str]]]) -> dict[str, str]:
    return {str(broker["brokerName"]): broker["brokerAddrs"][MASTER] for broker in brokers if MASTER in broker["brokerAddrs"]}
