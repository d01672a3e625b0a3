"""Lists topics and consumer groups as each broker has them, and creates missing ones, for `outbox_topics`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec

from outbox.brokers.base import ServerResource
from outbox.brokers.rocketmq.client import RocketMQClient
from outbox.brokers.rocketmq.group_checks import MIN_RETRIES
from outbox.brokers.rocketmq.remoting import requests
from outbox.brokers.rocketmq.remoting.frames import RemotingAnswer, RemotingError, Request
from outbox.brokers.rocketmq.settlement import ORDERED_SUFFIX, group_name
from outbox.errors import BrokerMisconfigured, BrokerUnavailable
from outbox.message import TopicSpec

MISSING_CODES = (requests.NO_SUCH_TOPIC, requests.NO_SUCH_GROUP)


class RocketMQResource(msgspec.Struct, frozen=True):
    """
    A topic or group that each broker needs.

    Args:
        find: the request for its settings.
        update: the request that creates it with the wanted settings, or changes its settings to them.
        compare: returns how settings differ from the wanted ones.
    """

    kind: str
    name: str
    wanted: Mapping[str, str]
    find: Request
    update: Request
    compare: Callable[[Mapping[str, Any]], Iterable[str]]

    @property
    def acl_name(self) -> str:
        """Its name in permissions (ACL 2.0)."""
        return f"{self.kind.capitalize()}:{self.name}"


async def list_resources(client: RocketMQClient, topics: Collection[TopicSpec], readers: Collection[str]) -> list[ServerResource]:
    """
    Return the topics and groups that are needed, as each broker has them.

    Raises:
        BrokerUnavailable: no name server, or a broker, does not answer.
    """
    groups = sorted({group_name(group, topic) for topic in topics for group in {*topic.groups, *readers}})
    needed = [*map(_topic_resource, topics), *map(_group_resource, groups)]
    try:
        brokers = sorted((await client.remoting.masters()).values())
        return [await _look_up(client, broker, resource) for broker in brokers for resource in needed]
    except (ConnectionError, RemotingError) as error:
        raise BrokerUnavailable(f"RocketMQ's brokers cannot be asked for topics and groups: {error}") from error


def _topic_resource(topic: TopicSpec) -> RocketMQResource:
    return RocketMQResource(
        "topic",
        topic.name,
        {"message.type": topic.type.upper(), "queues": str(topic.queues)},
        Request(requests.GET_TOPIC_CONFIG, {"topic": topic.name}),
        requests.update_topic(topic.name, topic.type, topic.queues),
        partial(_topic_differences, topic),
    )


def _topic_differences(topic: TopicSpec, settings: Mapping[str, Any]) -> Iterator[str]:
    kind = (settings.get("attributes") or {}).get("message.type", "UNSPECIFIED")
    if kind != topic.type.upper():
        yield f"message.type={kind}, not {topic.type.upper()}"
    if (queues := min(settings["readQueueNums"], settings["writeQueueNums"])) < topic.queues:
        yield f"{queues} queues, not {topic.queues}"


def _group_resource(group: str) -> RocketMQResource:
    is_ordered = group.endswith(ORDERED_SUFFIX)
    return RocketMQResource(
        "group",
        group,
        {"retryMaxTimes": str(MIN_RETRIES), "consumeMessageOrderly": _text(is_ordered)},
        Request(requests.GET_GROUP_CONFIG, {"group": group}),
        requests.update_group(group, is_ordered=is_ordered, retries=MIN_RETRIES),
        partial(_group_differences, is_ordered),
    )


def _group_differences(is_ordered: bool, settings: Mapping[str, Any]) -> Iterator[str]:
    if (retries := int(settings["retryMaxTimes"])) < MIN_RETRIES:
        yield f"retryMaxTimes={retries}, not {MIN_RETRIES} or more"
    if settings["consumeMessageOrderly"] is not is_ordered:
        yield f"consumeMessageOrderly={_text(not is_ordered)}, not {_text(is_ordered)}"


def _text(value: bool) -> str:
    return "true" if value else "false"


async def _look_up(client: RocketMQClient, broker: str, needed: RocketMQResource) -> ServerResource:
    """Return a resource as a broker (host:port) has it. Raises ConnectionError, RemotingError."""
    create = partial(_create, client, broker, needed)
    resource = partial(ServerResource, needed.kind, needed.name, needed.wanted, create, place=broker)
    answer = await client.remoting.ask(broker, needed.find)
    if answer.code == requests.NO_PERMISSION:
        trouble = f"The broker refuses: {answer.text}. Grant ACCESS_KEY Get on {needed.acl_name} (ACL 2.0), or correct the keys."
        return resource(exists=None, trouble=trouble)
    if answer.code in MISSING_CODES:
        return resource(exists=False)
    return resource(exists=True, differences=tuple(needed.compare(json.loads(answer.checked().body))))


def _create(client: RocketMQClient, broker: str, needed: RocketMQResource) -> None:
    """Create a resource on a broker, unless it exists by now: then the same request would change its settings."""
    try:
        if client.run(client.remoting.ask(broker, needed.find)).code in MISSING_CODES:
            _require_done(broker, needed, client.run(client.remoting.ask(broker, needed.update)))
    except ConnectionError as error:
        raise BrokerUnavailable(f"RocketMQ broker {broker} does not answer: {error}") from error


def _require_done(broker: str, needed: RocketMQResource, answer: RemotingAnswer) -> None:
    if answer.code:
        hint = "Correct the topic's name or settings."
        if answer.code == requests.NO_PERMISSION:
            hint = f"Grant ACCESS_KEY the permission Create on {needed.acl_name} (ACL 2.0)."
        raise BrokerMisconfigured(f"Broker {broker} did not create {needed.kind} {needed.name!r}: {answer.text}.", hint)
