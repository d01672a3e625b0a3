"""
Receives messages, and waits for notifications. A consumer that finds no message registers, scans again, and waits.

The consumer stays registered while its receives return fewer messages than their limit. Meanwhile it reads only the queues that
notifications name, and scans all queues once a second. A notification may be lost, since that scan finds the message: so
notifications only reduce latency. There are none over a pooled connection. A consumer then scans soon, and less and less often.
"""

from __future__ import annotations

import time
from datetime import timedelta

from outbox.embedded import receiver
from outbox.embedded.client import NOT_VALID, EmbeddedClient
from outbox.embedded.receiver import Reader, Received, ScanResult
from outbox.embedded.rows import ReadRow

POLL_SECONDS = 1.0  # the interval of scans of all queues
# The first wait of a consumer without notifications, or after another consumer was faster. The wait doubles while the consumer
# finds nothing.
FIRST_PAUSE_SECONDS = 0.05


def take(client: EmbeddedClient, reader: Reader, limit: int, wait: timedelta) -> list[ReadRow]:
    """Take up to `limit` messages. If there are none, wait up to `wait` for the first one."""
    deadline = time.monotonic() + wait.total_seconds()
    connection = client.connection()
    pause = FIRST_PAUSE_SECONDS
    payloads: set[str] = set()
    while True:
        payloads |= client.notifications()
        available = _read_notifications(client, reader, payloads) if wait else None
        if available is None:
            available = receiver.scan(connection, reader)
            if client.is_registered and reader.now() is None:  # a test's clock may change at any time
                seconds = POLL_SECONDS if available.seconds_to_next is None else min(POLL_SECONDS, available.seconds_to_next)
                client.scan_validity = reader.reads, time.monotonic() + seconds
        received = receiver.take(connection, reader, available, limit) if available else Received([])
        if len(received.rows) == limit:
            client.deregister()
        if available and not received.rows:
            client.scan_validity = NOT_VALID  # another consumer took the messages, or more deliveries are due
        remaining = deadline - time.monotonic()
        if received.rows or remaining <= 0 or client.is_closing:
            return received.rows
        payloads = set()
        if received.may_have_more or client.register():
            continue
        seconds = POLL_SECONDS
        if available or not client.is_registered:
            seconds, pause = pause, min(pause * 2, POLL_SECONDS)
        payloads = client.wait(
            min(remaining, seconds, POLL_SECONDS if available.seconds_to_next is None else available.seconds_to_next)
        )


def _read_notifications(client: EmbeddedClient, reader: Reader, payloads: set[str]) -> ScanResult | None:
    """Return the queues that notifications name, as long as no others can have new messages. None: scan all queues."""
    reads, valid_until = client.scan_validity
    remaining = valid_until - time.monotonic()
    if reads != reader.reads or remaining <= 0 or "" in payloads:
        return None
    queues = [(int(topic_id), int(queue)) for topic_id, _, queue in (payload.partition(":") for payload in payloads)]
    _, topic_ids = reader.reads
    return ScanResult(False, [(topic_id, queue) for topic_id, queue in queues if topic_id in topic_ids], remaining)
