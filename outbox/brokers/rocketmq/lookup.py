"""Look-ups for operators and tests, at the brokers' own ports: where a message is, how many wait for a group."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace

from outbox.brokers.base import HalfRef, StoredCopy
from outbox.brokers.rocketmq.brokers import of_all
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.dead_letters import topics_given_up
from outbox.brokers.rocketmq.envelope import HALF_MARK
from outbox.brokers.rocketmq.places import HALVES, Place
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import Request, Stored

DELAYED = "rmq_sys_wheel_timer"

OFFSETS = re.compile(rb'"brokerOffset":(\d+),"consumerOffset":(\d+)')


async def find(client: Client, topics: Iterable[str], message_id: str, half: HalfRef | None) -> list[StoredCopy]:
    """
    Look a message up by its id, which is one of its keys, in topics, among halves and among delayed messages.

    A half message stays in the log whatever became of it; so it is told of only where no message came of it. After a crash a
    broker may no longer find by key what it has; its half message is found by its place then.
    """
    found: dict[tuple[str, str], StoredCopy] = {}
    for topic in topics:
        for stored in await _query(client, topic, message_id):
            found[topic, "visible"] = StoredCopy(message_id, topic, "visible", _half_id(stored), stored.stored_at)
    if found:
        given_up = set(await of_all(client, lambda broker: topics_given_up(client, broker, message_id)))
        return [replace(one, state="dead_letter") if one.topic in given_up else one for one in found.values()]
    for system_topic, state in (HALVES, "half"), (DELAYED, "delayed"):
        for stored in await _query(client, system_topic, message_id):
            topic = stored.properties.get("REAL_TOPIC", stored.topic)
            half_id = _half_id(stored)
            found[topic, half_id] = StoredCopy(message_id, topic, state, half_id, stored.stored_at)
    if half is not None and not found and (lying := await _lying_at(client, half)):
        return [StoredCopy(message_id, half.topic, "half", half.half_id, lying.stored_at)]
    return list(found.values())


async def topics_read_by(client: Client, group: str) -> set[str]:
    """Return the topics of which a group of the server's has read messages."""

    async def ask(broker: str) -> list[str]:
        answer = await client.ports.ask(broker, Request(requests.TOPICS_OF_GROUP, {"group": group}))
        return [] if answer.code in NOT_THERE else list(json.loads(answer.checked().body)["topicList"])

    return set(await of_all(client, ask))


async def backlog(client: Client, group: str, topic: str) -> int:
    """Count the messages of a topic that a group of the server's has not been handed."""

    async def ask(broker: str) -> list[int]:
        request = Request(requests.GET_CONSUME_STATS, {"consumerGroup": group, "topic": topic})
        answer = await client.ports.ask(broker, request)
        if answer.code in NOT_THERE:
            return []
        return [int(end) - int(at) for end, at in OFFSETS.findall(answer.checked().body)]

    return sum(await of_all(client, ask))


# 1: a topic or group without any offset
NOT_THERE = {requests.NOTHING_FOUND, requests.NO_SUCH_GROUP, requests.NO_SUCH_TOPIC, requests.SYSTEM_ERROR}


async def _query(client: Client, topic: str, key: str) -> list[Stored]:
    return await of_all(client, lambda broker: client.ports.find(broker, topic, key))


async def _lying_at(client: Client, half: HalfRef) -> Stored | None:
    place = Place.read(half.place)
    address = (await client.ports.addresses(half.topic)).get(place.broker) if place else None
    if place is None or address is None:
        return None
    return await client.ports.view(address, place.log_offset, half.half_id)


def _half_id(stored: Stored) -> str:
    wire_id = stored.properties.get("UNIQ_KEY", "")
    return wire_id if HALF_MARK in wire_id else ""
