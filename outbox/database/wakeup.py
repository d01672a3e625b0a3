"""Wake idle relays by NOTIFY."""

from __future__ import annotations

from outbox.database.connections import Connection

# While the server's queue of notifications is full, a commit that notifies fails, whichever program has filled the queue. So
# nothing is sent then: relays and consumers also poll without a wakeup. Calling the function has a second use: PostgreSQL frees
# the part of the queue that all listeners have read.
HAS_ROOM = "pg_notification_queue_usage() < 0.9"

WAKE_RELAY = f"SELECT pg_notify('outbox', '') FROM outbox_wakeup WHERE {HAS_ROOM} LIMIT 1"


def wake_relay(connection: Connection) -> None:
    """Notify idle relays when the transaction commits; nothing is sent if none is idle."""
    connection.execute(WAKE_RELAY)


def name_topic(topic_id: int, broker: str) -> str:
    """Return the payload of a notification, which names a topic and its broker."""
    return f"{topic_id}:{broker}"
