"""Wake an idle relay from anywhere: it says in a row that it waits, and listens."""

from __future__ import annotations

from outbox.database.connections import Connection

WAKE_RELAY = "SELECT pg_notify('outbox', '') FROM outbox_idle LIMIT 1"


def wake_relay(connection: Connection) -> None:
    """Notify idle relays when the transaction commits; costs nothing where none is idle."""
    connection.execute(WAKE_RELAY)
