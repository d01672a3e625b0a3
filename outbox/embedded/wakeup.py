"""
Receive messages, and wait for notifications: a consumer that finds nothing registers, scans again, and waits.

It stays registered while its receives return fewer messages than their limit: then it reads the queues that notifications name,
and scans all queues only from time to time. A notification may be lost; the scan a second later finds the message, so
notifications cost or save latency only. Behind a pooler there are none: there a consumer scans soon, then less and less often.
"""

from __future__ import annotations

import time
from datetime import timedelta

from outbox.embedded import receiver
from outbox.embedded.client import NOT_VALID, EmbeddedClient
from outbox.embedded.receiver import Reader, Received, ScanResult
from outbox.embedded.rows import ReadRow

POLL_SECONDS = 1.0
# The first wait of a consumer that gets no notifications, or whose messages another one took. The wait doubles while it finds
# nothing.
FIRST_PAUSE_SECONDS = 0.05


def take(client: EmbeddedClient, reader: Reader, limit: int, wait: timedelta) -> list[ReadRow]:
    """Take up to `limit` messages; if there are none, wait up to that long for the first."""
    deadline = time.monotonic() + wait.total_seconds()
    connection = client.connection()
    pause = FIRST_PAUSE_SECONDS
    payloads: set[str] = set()
    while True:
        payloads |= client.notifications()
        seen = _read_notifications(client, reader, payloads) if wait else None
        if seen is None:
            seen = receiver.scan(connection, reader)
            if client.is_registered and reader.now() is None:  # a test's clock may change at any time
                seconds = POLL_SECONDS if seen.seconds_to_next is None else min(POLL_SECONDS, seen.seconds_to_next)
                client.scan_validity = reader.reads, time.monotonic() + seconds
        received = receiver.take(connection, reader, seen, limit) if seen else Received([])
        if len(received.rows) == limit:
            client.deregister()
        if seen and not received.rows:
            client.scan_validity = NOT_VALID  # another consumer took them, or more is due
        left = deadline - time.monotonic()
        if received.rows or left <= 0 or client.is_closing:
            return received.rows
        payloads = set()
        if received.may_have_more or client.register():
            continue
        seconds = POLL_SECONDS
        if seen or not client.is_registered:
            seconds, pause = pause, min(pause * 2, POLL_SECONDS)
        payloads = client.wait(min(left, seconds, POLL_SECONDS if seen.seconds_to_next is None else seen.seconds_to_next))


def _read_notifications(client: EmbeddedClient, reader: Reader, payloads: set[str]) -> ScanResult | None:
    """Return the queues that notifications name, while nothing else can be new. None: scan all queues."""
    read, until = client.scan_validity
    left = until - time.monotonic()
    if read != reader.reads or left <= 0 or "" in payloads:
        return None
    queues = [(int(topic_id), int(queue)) for topic_id, _, queue in (payload.partition(":") for payload in payloads)]
    _, topic_ids = reader.reads
    return ScanResult(False, [(topic_id, queue) for topic_id, queue in queues if topic_id in topic_ids], left)
