"""Wake idle relays by NOTIFY."""

from __future__ import annotations

from outbox.database.connections import Connection

WAKE_RELAY = "SELECT pg_notify('outbox', '') FROM outbox_wakeup LIMIT 1"


def wake_relay(connection: Connection) -> None:
    """Notify idle relays when the transaction commits; sends nothing if none is idle."""
    connection.execute(WAKE_RELAY)


def name_topic(topic_id: int, broker: str) -> str:
    """Return the payload of a notification: a topic and its broker."""
    return f"{topic_id}:{broker}"
