"""Requests to all brokers that serve the topics in settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.remoting.connection import NotConnected
from outbox.brokers.rocketmq.remoting.frames import RemotingError
from outbox.errors import BrokerUnavailable

R = TypeVar("R")


async def addresses_of_all(client: RocketMQClient) -> list[str]:
    """
    Return host:port of each broker that has a topic of ours.

    Raises:
        NotConnected: no name server answers, or none knows a broker: a name server removes brokers that are down.
    """
    addresses: dict[str, str] = dict(client.options.broker_addresses)
    for topic in client.topics:
        addresses |= await client.ports.addresses(topic)
    if not addresses and not await client.ports.has_brokers():
        raise NotConnected("No name server knows a broker.")
    return [addresses[name] for name in sorted(addresses)]


async def ask_all(client: RocketMQClient, ask: Callable[[str], Awaitable[Sequence[R]]]) -> list[R]:
    """Ask every broker, and return all answers. Raises BrokerUnavailable if one does not answer."""
    rows: list[R] = []
    try:
        for broker in await addresses_of_all(client):
            rows.extend(await ask(broker))
    except (ConnectionError, RemotingError) as error:
        raise BrokerUnavailable(f"A RocketMQ broker's own port does not answer: {error}") from error
    return rows
