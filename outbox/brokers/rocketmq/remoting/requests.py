"""Requests to brokers and name servers, and functions that read their answers. Source: apache/rocketmq RequestCode."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping

from outbox.brokers.rocketmq.remoting.frames import (
    RemotingAnswer,
    RemotingError,
    Request,
    StoredMessage,
    stored_message,
    stored_messages,
    write_properties,
)
from outbox.message import TopicType

PULL_MESSAGE = 11
QUERY_MESSAGE = 12
QUERY_CONSUMER_OFFSET, UPDATE_CONSUMER_OFFSET = 14, 15
UPDATE_TOPIC = 17
GET_BROKER_CONFIG = 26
GET_RUNTIME_INFO = 28
SEARCH_OFFSET_BY_TIMESTAMP = 29
GET_MAX_OFFSET = 30
VIEW_MESSAGE = 33
END_TRANSACTION = 37
PUT_KV_CONFIG, GET_KV_CONFIG = 100, 101
ROUTE_OF_TOPIC = 105
GET_CLUSTER_INFO = 106
UPDATE_GROUP = 200
GET_CONSUME_STATS = 208
GROUPS_OF_TOPIC = 300
SEND_MESSAGE_V2 = 310
TOPICS_OF_GROUP = 343
GET_TOPIC_CONFIG = 351
GET_GROUP_CONFIG = 352

# Answers. Source: apache/rocketmq ResponseCode.
SYSTEM_ERROR = 1
SYSTEM_BUSY = 2
NO_PERMISSION = 16
NO_SUCH_TOPIC = 17
NOTHING_MORE = 19
AGAIN = 20
ELSEWHERE = 21
NOTHING_FOUND = 22
NO_SUCH_GROUP = 26

READER = "TOOLS_CONSUMER"  # a group that every broker has, for tools that only read
HAS_SUBSCRIPTION = 0x1 << 2  # flag of a pull that contains its subscription
MAX_PULLED = 32  # the server's limit for a pull
MAX_FOUND = 64  # the server's limit for a query
ANY_QUEUE = -1

COMMIT_TYPE, ROLLBACK_TYPE = 8, 12


def update_topic(name: str, kind: TopicType, queues: int) -> Request:
    """Return a request to create a topic, or to give one that is there these queues. A broker refuses another type."""
    fields = {
        "topic": name,
        "defaultTopic": "TBW102",
        "readQueueNums": queues,
        "writeQueueNums": queues,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": "false",
        "attributes": f"+message.type={kind.upper()}",
    }
    return Request(UPDATE_TOPIC, fields)


def update_group(name: str, *, is_ordered: bool, retries: int) -> Request:
    """Return a request to create a consumer group, or to give one that is there these settings."""
    group = {
        "groupName": name,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "consumeMessageOrderly": is_ordered,
        "retryQueueNums": 1,
        "retryMaxTimes": retries,
        "brokerId": 0,
        "whichBrokerWhenConsumeSlowly": 1,
    }
    return Request(UPDATE_GROUP, {}, json.dumps(group).encode())


def query(topic: str, key: str) -> Request:
    """Return a request for the messages of a topic that have a key, or this id."""
    end = int(time.time() * 1000) + 24 * 3600 * 1000
    fields = {"topic": topic, "key": key, "maxNum": MAX_FOUND, "beginTimestamp": 0, "endTimestamp": end}
    return Request(QUERY_MESSAGE, fields)


def found(answer: RemotingAnswer, key: str) -> list[StoredMessage]:
    """Return the messages that a query found, without hash collisions of the broker's index. Raises RemotingError."""
    if answer.code in (NOTHING_FOUND, NO_SUCH_TOPIC):
        return []
    messages = stored_messages(answer.checked().body)
    return [
        message
        for message in messages
        if key in message.properties.get("KEYS", "").split(" ") or key == message.properties.get("UNIQ_KEY")
    ]


def view(log_offset: int) -> Request:
    """Return a request for the message at an offset of a broker's log."""
    return Request(VIEW_MESSAGE, {"offset": log_offset})


def viewed(answer: RemotingAnswer) -> StoredMessage | None:
    """Return the message that was requested by `view`. None: no message begins at the offset. Raises RemotingError."""
    if answer.code == SYSTEM_ERROR:
        return None
    answer.checked()
    try:
        return stored_message(answer.body)
    except (ValueError, IndexError, OverflowError, OSError, struct.error):  # the offset is inside a message
        return None


def pull(topic: str, queue: int, offset: int, *, group: str = READER) -> Request:
    """Return a request for the messages of a queue from an offset on, without a consumer group's offset."""
    return Request(
        PULL_MESSAGE,
        {
            "consumerGroup": group,
            "topic": topic,
            "queueId": queue,
            "queueOffset": offset,
            "maxMsgNums": MAX_PULLED,
            "sysFlag": HAS_SUBSCRIPTION,
            "commitOffset": 0,
            "suspendTimeoutMillis": 0,
            "subscription": "*",
            "subVersion": 0,
        },
    )


def pulled(answer: RemotingAnswer) -> tuple[list[StoredMessage], int]:
    """Return the pulled messages and the next offset, which is unchanged at the end of the queue. Raises RemotingError."""
    if answer.code not in (0, NOTHING_MORE, AGAIN, ELSEWHERE):
        raise RemotingError(answer.code, answer.text)
    return list(stored_messages(answer.body)), int(answer.fields["nextBeginOffset"])


def offset_at(topic: str, queue: int, milliseconds: int) -> Request:
    """Return a request for the first offset of a queue since a time (since 1970); it is `offset` in the answer's fields."""
    return Request(SEARCH_OFFSET_BY_TIMESTAMP, {"topic": topic, "queueId": queue, "timestamp": milliseconds})


def end_of(topic: str, queue: int) -> Request:
    """Return a request for the end of a queue; it is `offset` in the answer's fields."""
    return Request(GET_MAX_OFFSET, {"topic": topic, "queueId": queue})


def offset_of(group: str, topic: str) -> Request:
    """Return a request for a group's offset in the only queue of a topic; it is `offset` in the answer's fields."""
    return Request(QUERY_CONSUMER_OFFSET, {"consumerGroup": group, "topic": topic, "queueId": 0})


def move_offset(group: str, topic: str, offset: int) -> Request:
    """Return a request to move a group to an offset in the only queue of a topic."""
    return Request(UPDATE_CONSUMER_OFFSET, {"consumerGroup": group, "topic": topic, "queueId": 0, "commitOffset": offset})


def send(
    topic: str,
    queue: int,
    body: bytes,
    properties: Mapping[str, str],
    *,
    group: str,
    flag: int = 0,
    born_at: int | None = None,
) -> Request:
    """
    Return a request to store a message. In the answer's fields, `msgId` ends with the log offset, 16 hex digits.

    Args:
        group: the producer group, which the broker asks about a half message.
        flag: the system flag: how the body is compressed, and whether it is a half message.
        born_at: milliseconds since 1970; by default now.
    """
    fields = {
        "a": group,
        "b": topic,
        "c": "TBW102",
        "d": 4,
        "e": queue,
        "f": flag,
        "g": int(time.time() * 1000) if born_at is None else born_at,
        "h": 0,
        "i": write_properties(properties),
        "j": 0,
        "k": False,
        "m": False,
    }
    return Request(SEND_MESSAGE_V2, fields, body)


def end(topic: str, half_id: str, queue_offset: int, log_offset: int, kind: int) -> Request:
    """Return a request to end the half message at a place. The broker checks neither its id nor whether it was ended before."""
    return Request(
        END_TRANSACTION,
        {
            "topic": topic,
            "producerGroup": topic,
            "tranStateTableOffset": queue_offset,
            "commitLogOffset": log_offset,
            "commitOrRollback": kind,
            "fromTransactionCheck": False,
            "msgId": half_id,
            "transactionId": half_id,
        },
    )
