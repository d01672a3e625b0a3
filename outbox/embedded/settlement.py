"""
Acknowledges, releases and renews deliveries.

A receipt is the id and the count of a delivery (rows.py), a pair that never occurs twice. Each statement matches both. When a
delivery is taken again, its count changes (receiver.py), so a call with the old receipt has no effect. Until then the call
succeeds, even after the delivery has expired: the delivery counts as held.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from outbox.brokers.base import Delivery
from outbox.database import Connection
from outbox.embedded.clock import NOW
from outbox.embedded.log import NOTIFY

ACK = """
WITH given AS (SELECT * FROM unnest(%(ids)s::bigint[], %(delivery_counts)s::int[]) AS g (id, delivery_count))
DELETE FROM outbox_embedded_delivery d USING given g
WHERE d.id = g.id AND d.delivery_count = g.delivery_count
RETURNING d.id
"""

# Skips rows that an ACK in another thread has locked, so that the two cannot deadlock.
RENEW = f"""
WITH held AS (
    SELECT d.id FROM outbox_embedded_delivery d
    JOIN unnest(%(ids)s::bigint[], %(delivery_counts)s::int[]) AS g (id, delivery_count) USING (id, delivery_count)
    FOR UPDATE OF d SKIP LOCKED
)
UPDATE outbox_embedded_delivery d SET due_at = {NOW} + %(invisible_for)s FROM held WHERE d.id = held.id
RETURNING d.id
"""

WAKE = f"SELECT {NOTIFY}"


def ack(connection: Connection, deliveries: Sequence[Delivery]) -> list[bool]:
    """Acknowledge deliveries. Return whether each was still held."""
    return _change_held(connection, ACK, deliveries, {})


def renew(
    connection: Connection, deliveries: Sequence[Delivery], invisible_for: timedelta, *, now: datetime | None
) -> list[Delivery | None]:
    """Hold deliveries for that time from now. None in place of one that is no longer held. Receipts do not change."""
    held = _change_held(connection, RENEW, deliveries, {"invisible_for": invisible_for, "now": now})
    return [delivery if is_held else None for delivery, is_held in zip(deliveries, held, strict=True)]


def release(connection: Connection, deliveries: Sequence[Delivery], *, now: datetime | None) -> None:
    """Make deliveries that are still held due at once, and notify waiting consumers."""
    renew(connection, deliveries, timedelta(), now=now)
    connection.execute(WAKE)


def _change_held(
    connection: Connection, statement: str, deliveries: Sequence[Delivery], parameters: dict[str, object]
) -> list[bool]:
    """Execute a statement for the deliveries that are still held. Return whether each was."""
    receipts = [delivery.receipt.split(":") for delivery in deliveries]
    ids, delivery_counts = [int(receipt[0]) for receipt in receipts], [int(receipt[1]) for receipt in receipts]
    changed = {row[0] for row in connection.execute(statement, {"ids": ids, "delivery_counts": delivery_counts, **parameters})}
    return [delivery_id in changed for delivery_id in ids]
