"""What the server's log holds: each copy is counted, also one that no consumer was handed. And whom the server may ask."""

import json

from outbox.brokers.rocketmq.remoting.frames import RemotingError
from project.servers.remoting import call, query, read_all
from tests.rocketmq_node import server

HALVES, ENDS = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"

PRODUCERS = 204


def copies(topic: str, message_id: str) -> int:
    """Count what consumers can see of a message: some milliseconds after its end, when the server has noted its key."""
    return len(query(server().broker_address, topic, message_id))


def seen(topic: str, message_ids: set[str]) -> set[str]:
    """Return those of the messages that consumers can see."""
    return {message_id for message_id in message_ids if copies(topic, message_id)}


def rounds(message_id: str) -> int:
    """Count how often the server wanted to ask about a half message, whether anybody listened or not."""
    stored = query(server().broker_address, HALVES, message_id)
    return max((int(one.properties.get("TRANSACTION_CHECK_TIMES", 0)) for one in stored), default=0)


def noted_ends() -> int:
    """Count the half messages of which the server has noted that they ended: it asks about none of them any more."""
    return sum(one.body.count(b",") for one in read_all(server().broker_address, ENDS, 1))


def producers(topic: str) -> set[str]:
    """Return the clients that the server may ask about a topic: a producer group is named as its topic."""
    try:
        found = call(server().broker_address, PRODUCERS, {"producerGroup": topic})
    except RemotingError:  # there is none
        return set()
    return {one["clientId"] for one in json.loads(found)["connectionSet"]}
