"""Look-ups for operators and tests, over the remoting protocol: the stored copies of a message, and backlogs of groups."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from outbox.brokers.base import StoredCopy
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.codec import HALF_MARK
from outbox.brokers.rocketmq.dead_letters import RETRY_PREFIX
from outbox.brokers.rocketmq.places import HALVES
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import Request, StoredMessage

DELAYED = "rmq_sys_wheel_timer"  # the server's topic of delayed messages

OFFSETS = re.compile(rb'"brokerOffset":(\d+),"consumerOffset":(\d+)')


async def find(client: RocketMQClient, topics: Iterable[str], message_id: str) -> list[StoredCopy]:
    """
    Return the stored copies of a message, looked up by its id: in topics, among half messages and among delayed messages.

    A half message stays in the log after its end, so it is returned only if there is no visible message.
    """
    copies: dict[tuple[str, str], StoredCopy] = {}
    for topic in topics:
        for stored in await _query(client, topic, message_id):
            copies[topic, "visible"] = StoredCopy(message_id, topic, "visible", _half_id(stored), stored.stored_at)
    if copies:
        return list(copies.values())
    for system_topic, state in (HALVES, "half"), (DELAYED, "delayed"):
        for stored in await _query(client, system_topic, message_id):
            topic = stored.properties.get("REAL_TOPIC", stored.topic)
            half_id = _half_id(stored)
            copies[topic, half_id] = StoredCopy(message_id, topic, state, half_id, stored.stored_at)
    return list(copies.values())


async def topics_read_by(client: RocketMQClient, group: str) -> set[str]:
    """Return the topics for which one of the server's groups has an offset."""

    async def ask(broker: str) -> list[str]:
        answer = await client.remoting.ask(broker, Request(requests.TOPICS_OF_GROUP, {"group": group}))
        return [] if answer.code in NOT_FOUND_CODES else list(json.loads(answer.checked().body)["topicList"])

    return set(await client.ask_brokers(ask))


async def backlog(client: RocketMQClient, group: str, topic: str) -> int:
    """Return the number of messages of a topic that can be delivered to one of the server's groups now, redeliveries included."""
    return await _lag(client, group, topic) + await _lag(client, group, f"{RETRY_PREFIX}{group}_{topic}")


async def _lag(client: RocketMQClient, group: str, topic: str) -> int:
    async def ask(broker: str) -> list[int]:
        request = Request(requests.GET_CONSUME_STATS, {"consumerGroup": group, "topic": topic})
        answer = await client.remoting.ask(broker, request)
        if answer.code in NOT_FOUND_CODES:
            return []
        return [int(end) - int(offset) for end, offset in OFFSETS.findall(answer.checked().body)]

    return sum(await client.ask_brokers(ask))


# The server answers SYSTEM_ERROR about a topic or group without any offset.
NOT_FOUND_CODES = {requests.NOTHING_FOUND, requests.NO_SUCH_GROUP, requests.NO_SUCH_TOPIC, requests.SYSTEM_ERROR}


async def _query(client: RocketMQClient, topic: str, key: str) -> list[StoredMessage]:
    return await client.ask_brokers(lambda broker: client.remoting.find(broker, topic, key))


def _half_id(stored: StoredMessage) -> str:
    wire_id = stored.properties.get("UNIQ_KEY", "")
    return wire_id if HALF_MARK in wire_id else ""
