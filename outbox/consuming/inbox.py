"""
The inbox: a group handles a message once.

The row goes in first, in the handler's own transaction. Beside it stands an advisory lock, held as long as the transaction: a
second delivery of the message that comes meanwhile finds it taken, waits for nobody and is tried later. Nor does the
transaction of a process that is frozen last for ever.
"""

from __future__ import annotations

import enum
from dataclasses import asdict
from datetime import timedelta

from django.db import connections

from outbox import conf
from outbox.consuming.delivery_info import DeliveryInfo
from outbox.database.locks import Lock
from outbox.models import Duplicate

IDLE_SHARE = 0.75  # of INVISIBLE; a handler at work sends a statement in each quarter

# No row where the group has handled what the key stands for, or another process does so now. The transaction may be idle no
# longer than `idle`, unless the database's own settings say how long.
CLAIM = f"""
WITH l AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s || ' ' || %(key)s)) AS is_mine,
        CASE WHEN %(idle)s::text IS NOT NULL AND current_setting('idle_in_transaction_session_timeout') = '0'
            THEN set_config('idle_in_transaction_session_timeout', %(idle)s, true) END
), i AS (
    INSERT INTO outbox_inbox (consumer_group, dedupe_key, message_id, source, topic, lane, number, nth)
    SELECT %(group)s, %(key)s, %(message_id)s, %(source)s, %(topic)s, %(lane)s, %(number)s, %(nth)s FROM l WHERE is_mine
    ON CONFLICT (consumer_group, dedupe_key) DO NOTHING
    RETURNING 1)
SELECT is_mine, EXISTS (SELECT FROM i) FROM l
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


class Claim(enum.Enum):
    """What became of a claim."""

    MINE = enum.auto()
    HANDLED = enum.auto()  # by an earlier delivery
    BUSY = enum.auto()  # another process handles it now


def claim(arrival: DeliveryInfo, key: str, using: str) -> Claim:
    """
    Write the inbox row in the caller's transaction, which may be idle for less than `INVISIBLE` from now on.

    It is over then when the message comes again. A test's own transaction, around it, is left as it is.
    """
    idle = max(1, conf.settings().consumer.invisible * IDLE_SHARE // timedelta(milliseconds=1))
    is_outermost = len(connections[using].atomic_blocks) < 2
    with connections[using].cursor() as cursor:
        cursor.execute(CLAIM, {**asdict(arrival), "key": key, "idle": str(int(idle)) if is_outermost else None})
        is_mine, is_new = cursor.fetchone()
    if not is_mine:
        return Claim.BUSY
    return Claim.MINE if is_new else Claim.HANDLED


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
