"""Open a connection to Celery's broker."""

from __future__ import annotations

from datetime import timedelta

from celery import Celery
from kombu import Connection
from kombu.transport import pyamqp

from outbox.brokers.base import SendResult, SendStatus

OUT_OF_TIME = SendResult(
    SendStatus.UNAVAILABLE, reason="The timeout of the batch was over, or the relay was stopped, before this task was sent."
)


def open_connection(app: Celery, timeout: timedelta) -> Connection:
    """
    Connect to the broker that an app publishes to, trying each of its nodes once.

    Raises:
        Exception: the transport cannot connect; the type depends on the transport.
    """
    seconds = timeout.total_seconds()
    connection: Connection = app.connection_for_write(heartbeat=0)
    options = connection.transport_options or {}
    if has_confirms(connection):
        # The producer waits for the confirms of a whole batch; with this option, py-amqp would wait for each message.
        connection.transport_options = {**options, "confirm_publish": False}
    elif connection.transport.driver_type == "redis":
        connection.transport_options = {"socket_timeout": seconds, "socket_connect_timeout": seconds, **options}
    other_nodes = max(0, len(connection.alt) - 1)
    connection.ensure_connection(max_retries=other_nodes, interval_start=0, interval_step=0, reraise_as_library_errors=False)
    return connection


def has_confirms(connection: Connection) -> bool:
    """Return whether a server behind this transport confirms what it has stored."""
    return isinstance(connection.transport, pyamqp.Transport)
