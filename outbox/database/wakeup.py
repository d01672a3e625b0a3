"""Wake idle relays by NOTIFY."""

from __future__ import annotations

from outbox.database.connections import Connection

# A commit that notifies fails while the server's queue of notifications is full, by any program. Relays and consumers look
# without a wakeup, too. Asking also frees what all listeners have read.
HAS_ROOM = "pg_notification_queue_usage() < 0.9"

WAKE_RELAY = f"SELECT pg_notify('outbox', '') FROM outbox_wakeup WHERE {HAS_ROOM} LIMIT 1"


def wake_relay(connection: Connection) -> None:
    """Notify idle relays when the transaction commits; sends nothing if none is idle."""
    connection.execute(WAKE_RELAY)


def name_topic(topic_id: int, broker: str) -> str:
    """Return the payload of a notification: a topic and its broker."""
    return f"{topic_id}:{broker}"
