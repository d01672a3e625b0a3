"""What RocketMQ's gRPC does not tell: where a message is, how much waits. Asked of the brokers' own ports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from outbox.brokers.base import StoredCopy
from outbox.brokers.rocketmq.dead_letters import topics_given_up
from outbox.brokers.rocketmq.envelope import HALF_MARK
from outbox.brokers.rocketmq.options import RocketMQOptions, address
from outbox.brokers.rocketmq.remoting import (
    GET_CONSUME_STATS,
    NO_SUCH_GROUP,
    NO_SUCH_TOPIC,
    NOTHING_FOUND,
    TOPICS_OF_GROUP,
    RemotingError,
    Stored,
    call,
    query,
)
from outbox.errors import BrokerUnavailable

R = TypeVar("R")

HALVES = "RMQ_SYS_TRANS_HALF_TOPIC"
DELAYED = "rmq_sys_wheel_timer"

NOT_THERE = {NOTHING_FOUND, NO_SUCH_GROUP, NO_SUCH_TOPIC, 1}  # 1: a topic or group without any offset

OFFSETS = re.compile(rb'"brokerOffset":(\d+),"consumerOffset":(\d+)')


def find(options: RocketMQOptions, topics: Iterable[str], message_id: str) -> list[StoredCopy]:
    """
    Look a message up by its id, which is one of its keys, in topics, among halves and among delayed messages.

    A half message stays in the log whatever became of it; so it is told of only where no message came of it.
    """
    found: dict[tuple[str, str], StoredCopy] = {}
    for topic in topics:
        for stored in _query(options, topic, message_id):
            found[topic, "visible"] = StoredCopy(message_id, topic, "visible", _half_id(stored), stored.stored_at)
    if found:
        given_up = set(_of_all(options, lambda broker: list(topics_given_up(broker, message_id))))
        return [replace(one, state="dead_letter") if one.topic in given_up else one for one in found.values()]
    for system_topic, state in (HALVES, "half"), (DELAYED, "delayed"):
        for stored in _query(options, system_topic, message_id):
            topic = stored.properties.get("REAL_TOPIC", stored.topic)
            half_id = _half_id(stored)
            found[topic, half_id] = StoredCopy(message_id, topic, state, half_id, stored.stored_at)
    return list(found.values())


def topics_read_by(options: RocketMQOptions, group: str) -> set[str]:
    """List the topics of which a group of the server's has read messages."""

    def ask(broker: tuple[str, int]) -> list[str]:
        return list(json.loads(call(broker, TOPICS_OF_GROUP, {"group": group}))["topicList"])

    return set(_of_all(options, ask))


def backlog(options: RocketMQOptions, group: str, topic: str) -> int:
    """Count the messages of a topic that a group of the server's has not been handed."""

    def ask(broker: tuple[str, int]) -> list[int]:
        stats = call(broker, GET_CONSUME_STATS, {"consumerGroup": group, "topic": topic})
        return [int(end) - int(at) for end, at in OFFSETS.findall(stats)]

    return sum(_of_all(options, ask))


def _query(options: RocketMQOptions, topic: str, key: str) -> list[Stored]:
    return _of_all(options, lambda broker: query(broker, topic, key))


def _half_id(stored: Stored) -> str:
    wire_id = stored.properties.get("UNIQ_KEY", "")
    return wire_id if HALF_MARK in wire_id else ""


def _of_all(options: RocketMQOptions, ask: Callable[[tuple[str, int]], Sequence[R]]) -> list[R]:
    """Ask every broker. Raises BrokerUnavailable when one does not answer: what it holds is not known."""
    found: list[R] = []
    for text in options.broker_addresses:
        try:
            found.extend(ask(address(text)))
        except RemotingError as error:
            if error.code not in NOT_THERE:
                raise BrokerUnavailable(f"RocketMQ broker {text} says {error}.") from error
        except OSError as error:
            raise BrokerUnavailable(f"RocketMQ broker {text} cannot be asked: {error}.") from error
    return found
