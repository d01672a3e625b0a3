"""
What each of the server's groups reads, announced to each proxy that is asked for messages.

All topics of a group are announced together, and of each topic everything, whatever the tags: RocketMQ wants one subscription
for a group, and during a deployment its members may want different tags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.endpoints import Endpoint
from outbox.brokers.rocketmq.session import Session, settings_of
from outbox.brokers.rocketmq.settlement import group_name
from outbox.brokers.rocketmq.stubs import definition, service
from outbox.message import TopicSpec

LEAST_WAIT_SECONDS = 5.0  # of the server: grpcClientConsumerMinLongPollingTimeoutMillis
SESSION_SECONDS = 10.0

EVERYTHING = definition.FilterExpression(type=definition.FilterType.TAG, expression="*")


class Subscriptions:
    """Sessions of consumer groups. In the client's loop only."""

    def __init__(self, client: Client, topics: Mapping[str, TopicSpec]) -> None:
        self._client = client
        self._topics = topics
        self._wanted: dict[str, frozenset[str]] = {}  # the server's group -> names of topics
        self._sessions: dict[tuple[str, str], tuple[frozenset[str], Session]] = {}

    def add(self, group: str, topics: Collection[str]) -> None:
        """Note what a group wants, all of it before its first request: a session announces it whole."""
        for topic in topics:
            server_group = group_name(group, self._topics[topic])
            self._wanted[server_group] = self._wanted.get(server_group, frozenset()) | {topic}

    async def introduce(self, endpoint: Endpoint, server_group: str) -> None:
        """Return when a proxy knows what one of the server's groups wants. Raises ConnectionError where it does not answer."""
        key = (endpoint.target, server_group)
        wanted = self._wanted[server_group]
        announced, session = self._sessions.get(key, (None, None))
        if session is None or announced != wanted:
            if session is not None:
                session.close()
            session = self._open(endpoint, server_group, wanted)
            self._sessions[key] = wanted, session
        if not await session.wait(SESSION_SECONDS):
            raise ConnectionError(f"the proxy did not answer in {SESSION_SECONDS} s; is there a consumer group {server_group!r}?")

    def _open(self, endpoint: Endpoint, server_group: str, topics: Collection[str]) -> Session:
        group = self._client.resource(server_group)
        settings = settings_of(self._client, endpoint, definition.ClientType.SIMPLE_CONSUMER)
        settings.subscription.group.CopyFrom(group)
        for name in sorted(topics):
            settings.subscription.subscriptions.add(topic=self._client.resource(name), expression=EVERYTHING)
        settings.subscription.long_polling_timeout.FromMilliseconds(round(LEAST_WAIT_SECONDS * 1000))
        heartbeat = service.HeartbeatRequest(group=group, client_type=definition.ClientType.SIMPLE_CONSUMER)
        return Session(self._client, endpoint, settings, heartbeat, lambda *_: None, role=server_group)
