"""
Checks of the server's consumer groups, whose settings are read over the remoting protocol.

The server moves a message to a dead-letter queue after `retryMaxTimes` redeliveries (`dead_letters.py`). It counts every return
of a message, as after a release or an outage, but no renewal. A message whose handler fails is not returned, but waits in the
group's database. So the server's count says nothing about failures, and the limit must be out of reach.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import Request
from outbox.brokers.rocketmq.settlement import ORDERED_SUFFIX
from outbox.findings import Finding, misconfigured, weak
from outbox.message import TopicSpec

# A returned message is redelivered after 2 s; on a fifo topic at once, which can be 300 times a second. So a message reaches this
# limit after three weeks of returns, or on a fifo topic after an hour. It reaches RocketMQ's default of 16 within half a minute.
MIN_RETRIES = 1_000_000

# Answers about a topic or group that was deleted during the check.
NOT_FOUND_CODES = {requests.NO_SUCH_GROUP, requests.NO_SUCH_TOPIC, requests.SYSTEM_ERROR}


async def problems_of_groups(client: RocketMQClient, broker: str, topics: Sequence[TopicSpec]) -> list[Finding]:
    """
    Return the problems of the consumer groups of topics on a broker (host:port).

    Raises:
        ConnectionError, RemotingError: the broker does not answer.
    """
    topic_of: dict[str, str] = {}  # group -> one of its topics
    for topic in topics:
        answer = await client.remoting.ask(broker, Request(requests.GROUPS_OF_TOPIC, {"topic": topic.name}))
        if answer.code == requests.NO_PERMISSION:
            return [_unchecked(broker, f"Get on Topic:{topic.name}")]
        if answer.code not in NOT_FOUND_CODES:
            topic_of |= dict.fromkeys(json.loads(answer.checked().body)["groupList"], topic.name)
    problems: list[Finding] = []
    for group, topic_name in sorted(topic_of.items()):
        answer = await client.remoting.ask(broker, Request(requests.GET_GROUP_CONFIG, {"group": group}))
        if answer.code == requests.NO_PERMISSION:
            problems.append(_unchecked(broker, f"Get on Group:{group}"))
        elif answer.code not in NOT_FOUND_CODES:
            problems += problems_of_group(broker, group, topic_name, json.loads(answer.checked().body))
    return problems


def problems_of_group(broker: str, group: str, topic: str, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """
    Yield the problems of a group's settings.

    Args:
        topic: one of its topics.
        settings: the group's settings by RocketMQ's names.
    """
    is_ordered = group.endswith(ORDERED_SUFFIX)
    command = f"mqadmin updateSubGroup -b {broker} -g {group} -r {MIN_RETRIES}{' -o true' if is_ordered else ''}"
    if (retries := int(settings["retryMaxTimes"])) < MIN_RETRIES:
        yield weak(
            f"Broker {broker} moves a message to a dead-letter queue after {retries + 1} deliveries to group {group} of topic "
            f"{topic} (retryMaxTimes={retries}), even if its handler never failed, since the broker counts every return.",
            f"{command} (no change is needed for a group of another program)",
        )
    if is_ordered and not settings["consumeMessageOrderly"]:
        yield misconfigured(
            f"Broker {broker} does not keep order for group {group} of topic {topic} (consumeMessageOrderly=false).", command
        )


def _unchecked(broker: str, permission: str) -> Finding:
    return weak(
        f"Broker {broker} denies ACCESS_KEY a permission: {permission}. Without it, retryMaxTimes of groups cannot be checked.",
        "Grant it (ACL 2.0). Only this check uses it.",
    )
