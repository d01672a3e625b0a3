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

# Codes of answers. Source: apache/rocketmq ResponseCode.
SYSTEM_ERROR = 1
SYSTEM_BUSY = 2
NO_PERMISSION = 16
NO_SUCH_TOPIC = 17
PULL_NOT_FOUND = 19
PULL_RETRY_IMMEDIATELY = 20
PULL_OFFSET_MOVED = 21
NOTHING_FOUND = 22
NO_SUCH_GROUP = 26

READER = "TOOLS_CONSUMER"  # a group that every broker has, for tools that only read
HAS_SUBSCRIPTION = 0x1 << 2  # flag of a pull that contains the filter of messages
MAX_PULLED = 32  # the server's limit of messages in the answer to a pull
MAX_FOUND = 64  # the server's limit of messages in the answer to a query
ANY_QUEUE = -1  # the broker chooses a queue

COMMIT_TYPE, ROLLBACK_TYPE = 8, 12


def update_topic(name: str, kind: TopicType, queues: int) -> Request:
    """Return a request to create a topic, or to change the queues of an existing one. A broker rejects a change of the type."""
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
    """Return a request to create a consumer group, or to change the settings of an existing one."""
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
    """Return a request for the messages of a topic that have a key or id."""
    end = int(time.time() * 1000) + 24 * 3600 * 1000
    fields = {"topic": topic, "key": key, "maxNum": MAX_FOUND, "beginTimestamp": 0, "endTimestamp": end}
    return Request(QUERY_MESSAGE, fields)


def found(answer: RemotingAnswer, key: str) -> list[StoredMessage]:
    """Return the messages that a query found. Hash collisions of the broker's index are left out. Raises RemotingError."""
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
    """Return the message from the answer to `view`. None: no message begins at the offset. Raises RemotingError."""
    if answer.code == SYSTEM_ERROR:
        return None
    answer.checked()
    try:
        return stored_message(answer.body)
    except (ValueError, IndexError, OverflowError, OSError, struct.error):  # the offset is inside a message
        return None


def pull(topic: str, queue: int, offset: int, *, group: str = READER) -> Request:
    """Return a request for the messages of a queue from an offset on. It does not change the group's offset."""
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
    """Return the pulled messages and the next offset, which at the end of the queue is the same one. Raises RemotingError."""
    if answer.code not in (0, PULL_NOT_FOUND, PULL_RETRY_IMMEDIATELY, PULL_OFFSET_MOVED):
        raise RemotingError(answer.code, answer.text)
    return list(stored_messages(answer.body)), int(answer.fields["nextBeginOffset"])


def offset_at(topic: str, queue: int, milliseconds: int) -> Request:
    """Return a request for the offset of a queue's first message since a time; the answer has it in the field `offset`."""
    return Request(SEARCH_OFFSET_BY_TIMESTAMP, {"topic": topic, "queueId": queue, "timestamp": milliseconds})


def end_of(topic: str, queue: int) -> Request:
    """Return a request for the offset at which a queue ends; the answer has it in the field `offset`."""
    return Request(GET_MAX_OFFSET, {"topic": topic, "queueId": queue})


def offset_of(group: str, topic: str) -> Request:
    """Return a request for a group's offset in the only queue of a topic; the answer has it in the field `offset`."""
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
    Return a request to store a message. The answer's field `msgId` ends with the offset in the log, in 16 hexadecimal digits.

    Args:
        group: the producer group to which the broker sends check-backs.
        flag: the system flags: whether the body is compressed, and whether this is a half message.
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
    """
    Return a request to end (commit or roll back) the half message at a place.

    The broker checks neither the half message's id nor whether it was ended before.

    Args:
        kind: COMMIT_TYPE or ROLLBACK_TYPE.
    """
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
