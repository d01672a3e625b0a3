"""Wake idle relays from anywhere: they say in a row that they wait, and listen."""

from __future__ import annotations

from outbox.database.connections import Connection

WAKE_RELAY = "SELECT pg_notify('outbox', '') FROM outbox_wakeup LIMIT 1"


def wake_relay(connection: Connection) -> None:
    """Notify idle relays when the transaction commits; costs nothing where none is idle."""
    connection.execute(WAKE_RELAY)


def name_topic(topic_id: int, broker: str) -> str:
    """Return what a publisher notifies relays of: a topic, and whose it is."""
    return f"{topic_id}:{broker}"
