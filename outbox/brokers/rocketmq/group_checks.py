"""
Checks of the server's consumer groups, whose settings are read at the brokers' own ports.

The server counts the deliveries of a message, and gives it up after `retryMaxTimes` redeliveries (`given_up.py`). Renewals do not
count; every return does, after a release or an outage. No failure returns a message, so the server's limit must be out of reach.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import Request
from outbox.brokers.rocketmq.settlement import ORDERED
from outbox.findings import Finding, misconfigured, weak
from outbox.message import TopicSpec

# A returned message is redelivered after 2 s; on a fifo topic at once, which can be 300 times a second. So this many returns take
# three weeks, or on a fifo topic an hour. RocketMQ's default of 16 is reached within half a minute.
MIN_RETRIES = 1_000_000

NOT_FOUND_CODES = {requests.NO_SUCH_GROUP, requests.NO_SUCH_TOPIC, requests.SYSTEM_ERROR}  # deleted since it was listed


async def problems_of_groups(client: RocketMQClient, broker: str, topics: Sequence[TopicSpec]) -> list[Finding]:
    """
    Return what is wrong with the consumer groups of topics on a broker (host:port).

    Raises:
        ConnectionError, RemotingError: the broker does not answer.
    """
    topic_of: dict[str, str] = {}  # group -> one of its topics
    for topic in topics:
        answer = await client.remoting.ask(broker, Request(requests.GROUPS_OF_TOPIC, {"topic": topic.name}))
        if answer.code == requests.NO_PERMISSION:
            return [_unknown(broker, f"Get on Topic:{topic.name}")]
        if answer.code not in NOT_FOUND_CODES:
            topic_of |= dict.fromkeys(json.loads(answer.checked().body)["groupList"], topic.name)
    problems: list[Finding] = []
    for group, name in sorted(topic_of.items()):
        answer = await client.remoting.ask(broker, Request(requests.GET_GROUP_CONFIG, {"group": group}))
        if answer.code == requests.NO_PERMISSION:
            problems.append(_unknown(broker, f"Get on Group:{group}"))
        elif answer.code not in NOT_FOUND_CODES:
            problems += problems_of_group(broker, group, name, json.loads(answer.checked().body))
    return problems


def problems_of_group(broker: str, group: str, topic: str, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """
    Return what is wrong with the settings of a group.

    Args:
        topic: one of its topics.
        settings: the group's settings by RocketMQ's names.
    """
    is_ordered = group.endswith(ORDERED)
    command = f"mqadmin updateSubGroup -b {broker} -g {group} -r {MIN_RETRIES}{' -o true' if is_ordered else ''}"
    if (retries := int(settings["retryMaxTimes"])) < MIN_RETRIES:
        yield weak(
            f"Broker {broker} gives a message up after {retries + 1} deliveries to group {group} of topic "
            f"{topic} (retryMaxTimes={retries}), even if it never failed: the broker counts every return.",
            f"{command} (no change is needed for a group of another program)",
        )
    if is_ordered and not settings["consumeMessageOrderly"]:
        yield misconfigured(
            f"Broker {broker} does not keep order for group {group} of topic {topic} (consumeMessageOrderly=false).", command
        )


def _unknown(broker: str, right: str) -> Finding:
    return weak(
        f"Broker {broker} denies ACCESS_KEY a permission: {right}. Without it, retryMaxTimes of the groups cannot be checked.",
        "Grant it (ACL 2.0). Only this check needs it.",
    )
