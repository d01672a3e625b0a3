"""
The brokers' own ports: their addresses, and a connection to each.

A broker's address comes from OPTIONS["BROKER_ADDRESSES"], or else from a name server, which is asked again from time to time and
when a broker does not answer.
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
A_BROKER = b'"brokerName"'  # in the JSON of brokers, which is asked for too often to be parsed
NUMBER_KEY = re.compile(rb"([{,])(\d+):")

AFTER_FAILURE_SECONDS = 1.0  # after a failure, fail at once for this long: each new attempt may take a whole time-out
IDLE_SECONDS = 30.0  # a broker without a request for longer than this may have been frozen

# Address -> (since when the server has answered every request of this process, when it answered last).
_answering: dict[str, tuple[float, float]] = {}


class RemotingClient:
    """
    Sends requests to brokers and name servers. In the thread of one loop only.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, options: RocketMQOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        # topic -> valid until, {broker: (named at, address)}
        self._known: dict[str, tuple[float, dict[str, tuple[float, str]]]] = {}
        self._name_servers = list(options.name_servers)  # the one that answered last comes first
        self._connections: dict[str, RemotingConnection] = {}
        self._failed: dict[str, tuple[float, NotConnected]] = {}
        self._silent: set[str] = set()  # addresses of servers whose last request was not answered
        self._opening: SingleFlight[RemotingConnection] = SingleFlight()
        self._asking: SingleFlight[dict[str, str]] = SingleFlight()
        self._tls: ssl.SSLContext | None = None

    @property
    def is_configured(self) -> bool:
        """Whether OPTIONS name brokers or name servers."""
        return bool(self._options.name_servers or self._options.broker_addresses)

    async def addresses(self, topic: str) -> dict[str, str]:
        """
        Return the brokers of a topic, also those that went down recently: name -> host:port of its master.

        Raises:
            NotConnected: no name server answers, and the topic is not known yet.
        """
        if not self._options.name_servers:
            return dict(self._options.broker_addresses)
        valid_until, known = self._known.get(topic, (0.0, {}))
        if self._clock() >= valid_until:
            try:
                named = await self._asking.join(topic, partial(self._ask_name_servers, topic))
            except NotConnected:
                if topic not in self._known:
                    raise
                named = {}
            now = self._clock()
            # A name server does not name a broker that is down. Keep its address for a while, and ask again soon.
            known = {name: entry for name, entry in known.items() if now - entry[0] < MISSING_SECONDS}
            known |= {name: (now, address) for name, address in named.items()}

            self._known[topic] = now + (ROUTE_SECONDS if named else RETRY_SECONDS), known
        return {name: self._options.broker_addresses.get(name, address) for name, (_, address) in known.items()}

    async def has_brokers(self) -> bool:
        """Return whether the name servers know any broker; True if no name server answers."""
        try:
            return A_BROKER in await self._ask_for_cluster()
        except NotConnected:
            return True

    async def masters(self) -> dict[str, str]:
        """
        Return all brokers that the name servers know, or those of OPTIONS if there is none: name -> host:port of its master.

        Raises:
            NotConnected: no name server answers, or none knows a broker.
        """
        if not self._options.name_servers:
            return dict(self._options.broker_addresses)
        cluster = json.loads(NUMBER_KEY.sub(rb'\1"\2":', await self._ask_for_cluster()))
        named = _masters(cluster["brokerAddrTable"].values())
        if not named:
            raise NotConnected("No name server knows a broker.")
        return {name: self._options.broker_addresses.get(name, address) for name, address in named.items()}

    def invalidate(self, topic: str) -> None:
        """Ask for the brokers of a topic again at their next use."""
        if topic in self._known:
            self._known[topic] = 0.0, self._known[topic][1]

    async def connect(self, address: str) -> None:
        """Connect to the server at host:port, so that the next request is sent at once. Raises NotConnected."""
        await self._connection(address)

    async def ask(self, address: str, request: Request) -> RemotingAnswer:
        """
        Send a request to the server at host:port, and return the answer.

        Raises:
            NotConnected: the request was not sent.
            NoAnswer: it was sent and not answered.
        """
        try:
            answer = await (await self._connection(address)).ask(request)
        except (NotConnected, NoAnswer) as error:
            _answering.pop(address, None)
            if isinstance(error, NoAnswer):
                self._silent.add(address)
            raise
        now = self._clock()
        since, last = _answering.get(address, (now, now))
        _answering[address] = (since if now - last < IDLE_SECONDS else now), now
        return answer

    async def find(self, address: str, topic: str, key: str) -> list[StoredMessage]:
        """Return the messages of a topic on a broker that have a key, or this id. Raises as `ask`, and RemotingError."""
        return requests.found(await self.ask(address, requests.query(topic, key)), key)

    async def view(self, address: str, log_offset: int, wire_id: str) -> StoredMessage | None:
        """Return the message at an offset of a broker's log, if it has this id. Raises as `ask`, and RemotingError."""
        stored = requests.viewed(await self.ask(address, requests.view(log_offset)))
        return stored if stored is not None and stored.properties.get("UNIQ_KEY") == wire_id else None

    def answering_for(self, address: str) -> float:
        """Return for how many seconds a server has answered every request of this process."""
        now = self._clock()
        return now - _answering.get(address, (now, now))[0]

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    async def _connection(self, address: str) -> RemotingConnection:
        """Return the connection to a server. Concurrent callers share one attempt to open it. Raises NotConnected."""
        known = self._connections.get(address)
        if known is not None and known.is_open:
            return known
        failed_at, error = self._failed.get(address, (float("-inf"), None))
        if error is not None and self._clock() - failed_at < AFTER_FAILURE_SECONDS:
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
        Connect to a server. If its last request was not answered, send a harmless one first, which is cheap for a busy broker.

        The machine of a frozen server still accepts connections. A message sent there may be stored when the server resumes, so
        each retry could make one more copy.
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
        Ask one name server after the other for all brokers, until one knows any; the answer's JSON has numbers as keys.

        One that has just started knows none until they announce themselves, up to 30 s later.

        Raises:
            NotConnected: none answers.
        """
        trouble, body = "there is none", None
        for address in self._name_servers:
            try:
                body = (await self.ask(address, Request(requests.GET_CLUSTER_INFO))).checked().body
            except (NotConnected, NoAnswer, RemotingError) as error:
                trouble = str(error)
            else:
                if A_BROKER in body:
                    break
        if body is None:
            raise NotConnected(f"No name server returns the brokers: {trouble}")
        return body

    async def _ask_name_servers(self, topic: str) -> dict[str, str]:
        """Ask one name server after the other, until one knows the topic. Raises NotConnected if none answers."""
        trouble, is_missing = "there is none", False
        for address in list(self._name_servers):
            try:
                answer = await self.ask(
                    address, Request(requests.ROUTE_OF_TOPIC, {"topic": topic, "acceptStandardJsonOnly": True})
                )
                self._name_servers.sort(key=lambda other: other != address)
                return _masters(json.loads(answer.checked().body)["brokerDatas"])
            except RemotingError as error:
                is_missing = is_missing or error.code == requests.NO_SUCH_TOPIC
                trouble = str(error)
            except (NotConnected, NoAnswer) as error:
                trouble = str(error)
        if is_missing:
            return {}
        raise NotConnected(f"No name server returns the route of topic {topic}: {trouble}")


def _masters(brokers: Iterable[dict[str, dict[str, str]]]) -> dict[str, str]:
    return {str(broker["brokerName"]): broker["brokerAddrs"][MASTER] for broker in brokers if MASTER in broker["brokerAddrs"]}
