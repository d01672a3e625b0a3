"""
The brokers' own ports: which there are, and a connection to each.

A broker's address is what OPTIONS say of its name, else what a name server says; a name server is asked again now and then,
and when a broker does not answer.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterable
from functools import partial

from outbox.brokers.rocketmq.options import RocketMQOptions, address
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.connection import Connection, NoAnswer, NotConnected
from outbox.brokers.rocketmq.remoting.frames import Answer, RemotingError, Request, Stored
from outbox.brokers.rocketmq.routes import AGAIN_SECONDS, MISSING_SECONDS, ROUTE_SECONDS
from outbox.brokers.rocketmq.shared import SharedAttempts

MASTER = "0"

AFTER_FAILURE_SECONDS = 1.0  # so long after a failure nobody tries to connect again: all who want to would wait for it
IDLE_SECONDS = 30.0  # a broker that was not asked for longer may have been frozen meanwhile

# Since when a broker has answered everything, and when it last did, by its address: of this process, whoever asked.
_answering: dict[str, tuple[float, float]] = {}


class Ports:
    """
    Asks brokers and name servers. In the thread of one loop only.

    Args:
        clock: gives seconds; it never goes back.
    """

    def __init__(self, options: RocketMQOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._told: dict[str, tuple[float, dict[str, tuple[float, str]]]] = {}  # topic -> good until, brokers: named at, address
        self._name_servers = list(options.name_servers)  # that which answered last comes first
        self._connections: dict[str, Connection] = {}
        self._failed: dict[str, tuple[float, NotConnected]] = {}
        self._silent: set[str] = set()  # those whose last request got no answer
        self._opening: SharedAttempts[Connection] = SharedAttempts()
        self._asking: SharedAttempts[dict[str, str]] = SharedAttempts()
        self._tls: ssl.SSLContext | None = None

    @property
    def are_known(self) -> bool:
        """Whether OPTIONS name brokers or name servers."""
        return bool(self._options.name_servers or self._options.broker_addresses)

    async def addresses(self, topic: str) -> dict[str, str]:
        """
        Return the brokers of a topic that are or were there: name -> host:port of its master.

        Raises:
            NotConnected: no name server can be asked, and OPTIONS name no broker.
        """
        if not self._options.name_servers:
            return dict(self._options.broker_addresses)
        good_until, told = self._told.get(topic, (0.0, {}))
        if self._clock() >= good_until:
            try:
                named = await self._asking.join(topic, partial(self._ask_name_servers, topic))
            except NotConnected:
                if topic not in self._told:
                    raise
                named = {}
            now = self._clock()
            # One that is away is named no more, and not gone for that.
            told = {name: one for name, one in told.items() if now - one[0] < MISSING_SECONDS}
            told |= {name: (now, place) for name, place in named.items()}
            # A name server strikes out a broker that is away: until it is back, ask soon.
            self._told[topic] = now + (ROUTE_SECONDS if named else AGAIN_SECONDS), told
        return {name: self._options.broker_addresses.get(name, place) for name, (_, place) in told.items()}

    async def is_any_broker_there(self) -> bool:
        """Return whether name servers know a broker that is there; True where none can be asked."""
        for place in self._name_servers:
            try:
                answer = await self.ask(place, Request(requests.GET_CLUSTER_INFO))
                return b'"brokerName"' in answer.checked().body  # its JSON has numbers for names
            except (NotConnected, NoAnswer, RemotingError):
                continue
        return True

    def doubt(self, topic: str) -> None:
        """Ask about the brokers of a topic again at the next use."""
        if topic in self._told:
            self._told[topic] = 0.0, self._told[topic][1]

    async def reach(self, place: str) -> None:
        """Connect to the server at host:port, so that the next request leaves at once. Raises NotConnected."""
        await self._connection(place)

    async def ask(self, place: str, request: Request) -> Answer:
        """
        Ask the server at host:port.

        Raises:
            NotConnected: the request did not leave.
            NoAnswer: it left.
        """
        try:
            answer = await (await self._connection(place)).ask(request)
        except (NotConnected, NoAnswer) as error:
            _answering.pop(place, None)
            if isinstance(error, NoAnswer):
                self._silent.add(place)
            raise
        now = self._clock()
        since, last = _answering.get(place, (now, now))
        _answering[place] = (since if now - last < IDLE_SECONDS else now), now
        return answer

    async def find(self, place: str, topic: str, key: str) -> list[Stored]:
        """Find the messages of a topic at a broker that have a key, or this very id. Raises as `ask`, and RemotingError."""
        return requests.found(await self.ask(place, requests.query(topic, key)), key)

    async def view(self, place: str, log_offset: int, wire_id: str) -> Stored | None:
        """Return what lies at a place of a broker's log, where it has that id. Raises as `ask`, and RemotingError."""
        stored = requests.viewed(await self.ask(place, requests.view(log_offset)))
        return stored if stored is not None and stored.properties.get("UNIQ_KEY") == wire_id else None

    def answering_for(self, place: str) -> float:
        """Return the seconds for which a server has answered all that this process asked it."""
        now = self._clock()
        return now - _answering.get(place, (now, now))[0]

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    async def _connection(self, place: str) -> Connection:
        """Return the connection to a server; of those who want it at once, one opens it. Raises NotConnected."""
        known = self._connections.get(place)
        if known is not None and known.is_open:
            return known
        failed_at, error = self._failed.get(place, (float("-inf"), None))
        if error is not None and self._clock() - failed_at < AFTER_FAILURE_SECONDS:
            raise NotConnected(str(error))
        return await self._opening.join(place, partial(self._reopen, place))

    async def _reopen(self, place: str) -> Connection:
        try:
            self._connections[place] = await self._open_and_greet(place)
        except NotConnected as error:
            self._failed[place] = self._clock(), error
            raise
        self._failed.pop(place, None)
        return self._connections[place]

    async def _open_and_greet(self, place: str) -> Connection:
        """
        Connect to a server; where the last request got no answer, see first that one is answered.

        A frozen server's machine takes connections. What is sent there may be done when it goes on, so each message sent again
        would be one more copy; and of each nobody knows whether it was stored.
        """
        connection = await self._open(place)
        if place in self._silent:
            try:
                await connection.ask(Request(requests.GET_RUNTIME_INFO))
            except NoAnswer as error:
                connection.close()
                raise NotConnected(f"{place} takes connections, and answers nothing.") from error
            self._silent.discard(place)
        return connection

    async def _open(self, place: str) -> Connection:
        options = self._options
        if options.broker_tls and self._tls is None:
            self._tls = ssl.create_default_context(cafile=options.tls_ca_file or None)
        host, port = address(place)
        seconds = options.request_timeout.total_seconds()
        keys = options.access_key, options.secret_key
        return await Connection.open(host, port, seconds=seconds, keys=keys, tls=self._tls)

    async def _ask_name_servers(self, topic: str) -> dict[str, str]:
        """Ask one after the other. Raises NotConnected when none answers."""
        trouble = "there is none"
        for place in list(self._name_servers):
            try:
                answer = await self.ask(place, Request(requests.ROUTE_OF_TOPIC, {"topic": topic, "acceptStandardJsonOnly": True}))
                self._name_servers.sort(key=lambda one: one != place)
                return _masters(json.loads(answer.checked().body)["brokerDatas"])
            except RemotingError as error:
                if error.code == requests.NO_SUCH_TOPIC:
                    return {}
                trouble = str(error)
            except (NotConnected, NoAnswer) as error:
                trouble = str(error)
        raise NotConnected(f"No name server says where topic {topic} is: {trouble}")


def _masters(brokers: Iterable[dict[str, dict[str, str]]]) -> dict[str, str]:
    return {str(one["brokerName"]): one["brokerAddrs"][MASTER] for one in brokers if MASTER in one["brokerAddrs"]}
