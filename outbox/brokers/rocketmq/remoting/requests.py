"""What is asked of brokers and name servers: the requests, and what their answers say. Source: apache/rocketmq RequestCode."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping

from outbox.brokers.rocketmq.remoting.frames import (
    COMPRESSION,
    Answer,
    RemotingError,
    Request,
    Stored,
    stored_message,
    stored_messages,
    write_properties,
)

SEND_MESSAGE = 10
PULL_MESSAGE = 11
QUERY_MESSAGE = 12
GET_ALL_TOPICS = 21
GET_BROKER_CONFIG = 26
GET_RUNTIME_INFO = 28
SEARCH_OFFSET_BY_TIMESTAMP = 29
GET_MAX_OFFSET = 30
VIEW_MESSAGE = 33
END_TRANSACTION = 37
ROUTE_OF_TOPIC = 105
GET_CLUSTER_INFO = 106
GET_CONSUME_STATS = 208
GROUPS_OF_TOPIC = 300
SEND_MESSAGE_V2 = 310
TOPICS_OF_GROUP = 343
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

READER = "TOOLS_CONSUMER"  # a group that every broker has, for tools that only look
BY_TAG = 0x1 << 2  # flag of a pull that says itself what it wants
AT_ONCE = 32  # messages that a pull returns at most, whatever is asked
FOUND_AT_ONCE = 64  # as a query does
ANY_QUEUE = -1

COMMIT_TYPE, ROLLBACK_TYPE = 8, 12


def query(topic: str, key: str) -> Request:
    """Find the messages of a topic that have a key, or this very id."""
    end = int(time.time() * 1000) + 24 * 3600 * 1000
    fields = {"topic": topic, "key": key, "maxNum": FOUND_AT_ONCE, "beginTimestamp": 0, "endTimestamp": end}
    return Request(QUERY_MESSAGE, fields)


def found(answer: Answer, key: str) -> list[Stored]:
    """Return what a query found; the broker's index knows hashes only. Raises RemotingError."""
    if answer.code in (NOTHING_FOUND, NO_SUCH_TOPIC):
        return []
    messages = stored_messages(answer.checked().body)
    return [one for one in messages if key in one.properties.get("KEYS", "").split(" ") or key == one.properties.get("UNIQ_KEY")]


def view(log_offset: int) -> Request:
    """Read what lies at a place of a broker's log."""
    return Request(VIEW_MESSAGE, {"offset": log_offset})


def viewed(answer: Answer) -> Stored | None:
    """Return the message that was viewed; None where no message begins there. Raises RemotingError where nobody can tell."""
    if answer.code == SYSTEM_ERROR:
        return None
    answer.checked()
    try:
        return stored_message(answer.body)
    except (ValueError, IndexError, OverflowError, OSError, struct.error):  # whatever lies there is read as one
        return None


def pull(topic: str, queue: int, offset: int) -> Request:
    """Read on in a queue of a topic, moving nobody's offset."""
    return Request(
        PULL_MESSAGE,
        {
            "consumerGroup": READER,
            "topic": topic,
            "queueId": queue,
            "queueOffset": offset,
            "maxMsgNums": AT_ONCE,
            "sysFlag": BY_TAG,
            "commitOffset": 0,
            "suspendTimeoutMillis": 0,
            "subscription": "*",
            "subVersion": 0,
        },
    )


def pulled(answer: Answer) -> tuple[list[Stored], int]:
    """Return some messages, and where to read on; that is where the pull began when nothing is left. Raises RemotingError."""
    if answer.code not in (0, NOTHING_MORE, AGAIN, ELSEWHERE):
        raise RemotingError(answer.code, answer.text)
    return list(stored_messages(answer.body)), int(answer.fields["nextBeginOffset"])


def offset_at(topic: str, queue: int, milliseconds: int) -> Request:
    """Find the first place in a queue of what was stored since a time (since 1970); `offset` in the answer's fields."""
    return Request(SEARCH_OFFSET_BY_TIMESTAMP, {"topic": topic, "queueId": queue, "timestamp": milliseconds})


def end_of(topic: str, queue: int) -> Request:
    """Find where a queue ends; `offset` in the answer's fields."""
    return Request(GET_MAX_OFFSET, {"topic": topic, "queueId": queue})


def send_copy(topic: str, queue: int, stored: Stored, properties: Mapping[str, str]) -> Request:
    """Store a message's body once more, with these properties, in a queue (-1: any)."""
    return send(topic, queue, stored.body, properties, group=READER, flag=stored.flag & COMPRESSION)


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
    Store a message. In the answer's fields, `msgId` ends with its place in the log, 16 hex digits; `queueOffset` is the other.

    Args:
        group: of producers; the broker asks those about a half message.
        flag: the system flag: how the body is compressed, and whether it is a half message.
        born_at: milliseconds since 1970; now unless given.
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
    """End the half message that lies at a place; the broker looks neither at its id nor at what became of it before."""
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
