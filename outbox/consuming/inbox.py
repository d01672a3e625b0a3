"""
The inbox: a group handles a message once.

The row goes in first, in the handler's own transaction. A second delivery of the message that comes meanwhile waits at the
unique key until that transaction ends: committed, it is dropped; rolled back, it is handled.
"""

from __future__ import annotations

from dataclasses import asdict

from django.db import connections

from outbox.consuming.delivery_info import DeliveryInfo
from outbox.models import Duplicate

# Say that a group handles a message; no row is written where it has.
CLAIM = """
INSERT INTO outbox_inbox (consumer_group, dedupe_key, message_id, source, topic, lane, number, nth)
VALUES (%(group)s, %(key)s, %(message_id)s, %(source)s, %(topic)s, %(lane)s, %(number)s, %(nth)s)
ON CONFLICT (consumer_group, dedupe_key) DO NOTHING
"""

# Another message was handled under the same dedupe key: write down that this one's number came, too.
ARRIVED_TOO = """
INSERT INTO outbox_inbox (consumer_group, dedupe_key, message_id, source, topic, lane, number)
SELECT %(group)s, %(message_id)s::text, %(message_id)s, %(source)s, %(topic)s, %(lane)s::smallint, %(number)s::bigint
WHERE NOT EXISTS (
    SELECT FROM outbox_inbox
    WHERE consumer_group = %(group)s AND dedupe_key = %(key)s AND message_id = %(message_id)s
)
ON CONFLICT (consumer_group, dedupe_key) DO NOTHING
"""


def claim(arrival: DeliveryInfo, key: str, using: str) -> bool:
    """Write the inbox row in the caller's transaction. False: the group has handled what that key stands for."""
    with connections[using].cursor() as cursor:
        cursor.execute(CLAIM, {**asdict(arrival), "key": key})
        return bool(cursor.rowcount)


def drop(arrival: DeliveryInfo, key: str, using: str) -> None:
    """Write down that a delivery was dropped, because the group has handled what its key stands for."""
    Duplicate.objects.using(using).create(
        consumer_group=arrival.group, message_id=arrival.message_id, topic=arrival.topic, nth=arrival.nth
    )
    with connections[using].cursor() as cursor:
        cursor.execute(ARRIVED_TOO, {**asdict(arrival), "key": key})


def ignore(arrival: DeliveryInfo, using: str) -> None:
    """Write down that a message came which no handler of the group takes, so that its number does not look lost."""
    claim(arrival, str(arrival.message_id), using)
