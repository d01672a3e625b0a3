"""
Announces the subscriptions of consumer groups to each proxy from which messages are received.

All topics of a group are announced together, without a tag filter: in RocketMQ all members of a group must have the same
subscription, and during a deployment they may want different tags.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.endpoints import Endpoint
from outbox.brokers.rocketmq.session import Session, settings_of
from outbox.brokers.rocketmq.settlement import group_name
from outbox.brokers.rocketmq.stubs import definition, service
from outbox.message import TopicSpec

MIN_WAIT_SECONDS = 5.0  # the server's limit: grpcClientConsumerMinLongPollingTimeoutMillis
SESSION_SECONDS = 10.0  # the timeout for a proxy's answer to an announcement

ALL_TAGS = definition.FilterExpression(type=definition.FilterType.TAG, expression="*")


class Subscriptions:
    """The sessions of consumer groups. Use it only in the client's event loop."""

    def __init__(self, client: RocketMQClient, topics: Mapping[str, TopicSpec]) -> None:
        self._client = client
        self._topics = topics
        self._topics_by_group: dict[str, frozenset[str]] = {}  # the server's group -> names of topics
        # (target of the proxy, the server's group) -> the announced topics, the session
        self._sessions: dict[tuple[str, str], tuple[frozenset[str], Session]] = {}

    def add(self, group: str, topics: Collection[str]) -> None:
        """Add topics to a group's subscription. Call it before the group's first request, since a change opens a new session."""
        for topic in topics:
            server_group = group_name(group, self._topics[topic])
            self._topics_by_group[server_group] = self._topics_by_group.get(server_group, frozenset()) | {topic}

    async def announce(self, endpoint: Endpoint, server_group: str) -> None:
        """Announce the subscription of a server's group, and wait for the proxy's answer. Raises ConnectionError without one."""
        key = (endpoint.target, server_group)
        wanted = self._topics_by_group[server_group]
        announced, session = self._sessions.get(key, (None, None))
        if session is None or announced != wanted:
            if session is not None:
                session.close()
            session = self._open(endpoint, server_group, wanted)
            self._sessions[key] = wanted, session
        if not await session.wait(SESSION_SECONDS):
            raise ConnectionError(f"the proxy did not answer in {SESSION_SECONDS} s; does consumer group {server_group!r} exist?")

    def _open(self, endpoint: Endpoint, server_group: str, topics: Collection[str]) -> Session:
        group = self._client.resource(server_group)
        settings = settings_of(self._client, endpoint, definition.ClientType.SIMPLE_CONSUMER)
        settings.subscription.group.CopyFrom(group)
        for name in sorted(topics):
            settings.subscription.subscriptions.add(topic=self._client.resource(name), expression=ALL_TAGS)
        settings.subscription.long_polling_timeout.FromMilliseconds(round(MIN_WAIT_SECONDS * 1000))
        heartbeat = service.HeartbeatRequest(group=group, client_type=definition.ClientType.SIMPLE_CONSUMER)
        return Session(self._client, endpoint, settings, heartbeat, lambda *_: None, role=server_group)
