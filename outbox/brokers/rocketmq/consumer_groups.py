"""
What the server's consumer groups must be set to, held against what they are: asked of the brokers' own ports.

The server counts how often it hands a message out, and moves it to the dead letters when it would do so once more than
`retryMaxTimes`. Renewals count nothing; each return counts one, whatever the reason: a failure, a hand-back, an outage. Which
message failed too often is decided by its group, so the server's own limit must be out of reach.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outbox.brokers.base import Problem
from outbox.brokers.rocketmq.client import Client
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import Request
from outbox.brokers.rocketmq.settlement import ORDERED
from outbox.message import TopicSpec

# A message that is handed back comes again after 2 s, on a fifo topic at once: some 300 times a second, if nobody waits. So this
# many returns take three weeks, and on a fifo topic an hour at least. RocketMQ's own 16 are over in half a minute.
LEAST_RETRIES = 1_000_000

NOT_TOLD = {requests.NO_SUCH_GROUP, requests.NO_SUCH_TOPIC, requests.SYSTEM_ERROR}  # gone since it was named


async def problems_of_groups(client: Client, broker: str, topics: Sequence[TopicSpec]) -> list[Problem]:
    """
    Return what is wrong with the groups that read topics at a broker (host:port).

    Raises:
        ConnectionError, RemotingError: the broker cannot be asked.
    """
    topic_of: dict[str, str] = {}  # group -> one of its topics
    for topic in topics:
        answer = await client.ports.ask(broker, Request(requests.GROUPS_OF_TOPIC, {"topic": topic.name}))
        if answer.code == requests.NO_PERMISSION:
            return [_unknown(broker, f"Get on Topic:{topic.name}")]
        if answer.code not in NOT_TOLD:
            topic_of |= dict.fromkeys(json.loads(answer.checked().body)["groupList"], topic.name)
    found: list[Problem] = []
    for group, name in sorted(topic_of.items()):
        answer = await client.ports.ask(broker, Request(requests.GET_GROUP_CONFIG, {"group": group}))
        if answer.code == requests.NO_PERMISSION:
            found.append(_unknown(broker, f"Get on Group:{group}"))
        elif answer.code not in NOT_TOLD:
            found += problems_of_group(broker, group, name, json.loads(answer.checked().body))
    return found


def problems_of_group(broker: str, group: str, topic: str, settings: Mapping[str, Any]) -> Iterator[Problem]:
    """
    Return which settings of a group do not fit.

    Args:
        topic: one that it reads.
        settings: as the broker names them.
    """
    is_ordered = group.endswith(ORDERED)
    command = f"mqadmin updateSubGroup -b {broker} -g {group} -r {LEAST_RETRIES}{' -o true' if is_ordered else ''}"
    if (retries := int(settings["retryMaxTimes"])) < LEAST_RETRIES:
        yield Problem(
            f"Broker {broker} gives up what it has handed to group {group}, which reads topic {topic}, {retries + 1} times "
            f"(retryMaxTimes={retries}), healthy messages included: each return counts, not failures alone.",
            f"{command} (a group of another program may stay as it is)",
            is_error=False,
        )
    if is_ordered and not settings["consumeMessageOrderly"]:
        yield Problem(
            f"Broker {broker} keeps no order for group {group}, which reads topic {topic} (consumeMessageOrderly=false).", command
        )


def _unknown(broker: str, right: str) -> Problem:
    return Problem(
        f"Broker {broker} refuses ACCESS_KEY a right: {right}. How soon the server gives up messages of its groups is not known.",
        "Grant it (ACL 2.0). Nothing else needs it.",
        is_error=False,
    )
