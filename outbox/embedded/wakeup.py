"""
Receives messages, and waits for notifications. A consumer that finds no message registers for them, scans again, and waits.

The consumer stays registered while its receives return fewer messages than their limit. Meanwhile it reads only the queues that
notifications name, and scans all queues once a second. That scan also finds a message whose notification was lost, so
notifications only reduce latency. Over a pooled connection there are none: the consumer then scans after FIRST_PAUSE_SECONDS, and
waits twice as long after each scan that finds nothing.
"""

from __future__ import annotations

import time
from datetime import timedelta

from outbox.embedded import receiver
from outbox.embedded.client import NOT_VALID, EmbeddedClient
from outbox.embedded.receiver import PreparedReceive, Received, ScanResult
from outbox.embedded.rows import ReadRow

POLL_SECONDS = 1.0  # the interval of scans of all queues
# The first wait of a consumer without notifications, or of one that lost the messages it had found to another consumer. The wait
# doubles, up to POLL_SECONDS, each time that the consumer gets nothing.
FIRST_PAUSE_SECONDS = 0.05


def take(client: EmbeddedClient, request: PreparedReceive, limit: int, wait: timedelta) -> list[ReadRow]:
    """Take up to `limit` messages. If there are none, wait up to `wait` for the first one."""
    deadline = time.monotonic() + wait.total_seconds()
    connection = client.connection()
    pause = FIRST_PAUSE_SECONDS
    payloads: set[str] = set()
    while True:
        payloads |= client.notifications()
        available = _read_notifications(client, request, payloads) if wait else None
        if available is None:
            available = receiver.scan(connection, request)
            if client.is_registered and request.now() is None:  # a test's clock may change at any time
                seconds = POLL_SECONDS if available.seconds_to_next is None else min(POLL_SECONDS, available.seconds_to_next)
                client.scan_validity = request.group_and_topic_ids, time.monotonic() + seconds
        received = receiver.take(connection, request, available, limit) if available else Received([])
        if len(received.rows) == limit:
            client.deregister()
        if available and not received.rows:
            client.scan_validity = NOT_VALID  # another consumer took the messages, or they wait for earlier ones of their keys
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


def _read_notifications(client: EmbeddedClient, request: PreparedReceive, payloads: set[str]) -> ScanResult | None:
    """Return the queues that notifications name, and the time until the next scan is needed. None: scan all queues now."""
    scanned, valid_until = client.scan_validity
    remaining = valid_until - time.monotonic()
    named = [payload.partition(":") for payload in payloads]
    # An empty payload names no queue (log.NOTIFY), nor does what another program may send.
    are_queues = all(topic_id.isdecimal() and queue.isdecimal() for topic_id, _, queue in named)
    if scanned != request.group_and_topic_ids or remaining <= 0 or not are_queues:
        return None
    queues = [(int(topic_id), int(queue)) for topic_id, _, queue in named]
    _, topic_ids = request.group_and_topic_ids
    return ScanResult(False, [(topic_id, queue) for topic_id, queue in queues if topic_id in topic_ids], remaining)
