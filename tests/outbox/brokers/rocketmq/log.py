"""What the server's log holds: each copy is counted, also one that no consumer was handed."""

from __future__ import annotations

from outbox.brokers.rocketmq.remoting import NOTHING_FOUND, RemotingError, query
from tests.rocketmq_node import server


def copies(topic: str, message_id: str) -> int:
    """Count what consumers can see of a message."""
    try:
        return len(query(server().broker_address, topic, message_id))
    except RemotingError as error:
        if error.code == NOTHING_FOUND:
            return 0
        raise


def seen(topic: str, message_ids: set[str]) -> set[str]:
    """Give those of the messages that consumers can see."""
    return {message_id for message_id in message_ids if copies(topic, message_id)}
