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
from outbox.embedded.client import EmbeddedClient, ScanValidity
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
        seen = _read_notifications(client.scan_validity, reader, payloads) if wait else None
        if seen is None:
            seen = receiver.scan(connection, reader)
            client.scan_validity = _scan_validity(client, reader, seen)
        received = receiver.take(connection, reader, seen, limit) if seen else Received([])
        if len(received.rows) == limit:
            client.deregister()
        if seen and not received.rows:
            client.scan_validity = None  # another consumer took them, or more is due
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


def _scan_validity(client: EmbeddedClient, reader: Reader, seen: ScanResult) -> ScanValidity | None:
    """Return how long only notifications can add to a scan whose messages are all taken; None: scan again."""
    if not client.is_registered or reader.now() is not None:  # a test's clock may change at any time
        return None
    seconds = POLL_SECONDS if seen.seconds_to_next is None else min(POLL_SECONDS, seen.seconds_to_next)
    return ScanValidity(reader.reads, time.monotonic() + seconds)


def _read_notifications(validity: ScanValidity | None, reader: Reader, payloads: set[str]) -> ScanResult | None:
    """Return the queues that notifications name, while nothing else can be new. None: scan all queues."""
    left = 0.0 if validity is None or validity.reads != reader.reads else validity.until - time.monotonic()
    if left <= 0 or "" in payloads:
        return None
    queues = [(int(topic_id), int(queue)) for topic_id, _, queue in (payload.partition(":") for payload in payloads)]
    _, topic_ids = reader.reads
    return ScanResult(False, [(topic_id, queue) for topic_id, queue in queues if topic_id in topic_ids], left)
