"""
The inbox: a group handles a message once.

The row is inserted first, in the handler's own transaction, together with an advisory lock that is held until the transaction
ends. A second delivery of the message in the meantime finds the lock taken; it does not wait, and is tried later. A timeout for
idle transactions ends the one of a frozen process.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Self

from django.db import connections

from outbox import conf, database
from outbox.brokers.base import Delivery
from outbox.consuming.delivery_info import DeliveryInfo
from outbox.database.locks import Lock
from outbox.message import TopicType
from outbox.models import Duplicate

IDLE_SHARE = 0.75  # of INVISIBLE; the keeper sends a statement in each quarter

# Nothing is written where the group has handled the key, where another process handles it now, or where another process handles a
# message with the same key of an ordered topic (`order`, NULL elsewhere). Sets the timeout of the idle transaction to `idle`,
# unless the database has a setting for it.
CLAIM = f"""
WITH l AS MATERIALIZED (
    SELECT pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s::text || ' ' || %(key)s::text)) AS is_mine,
        %(order)s::text IS NULL OR pg_try_advisory_xact_lock({Lock.ORDER}, hashtext(%(order)s::text)) AS is_next,
        CASE WHEN %(idle)s::text IS NOT NULL AND current_setting('idle_in_transaction_session_timeout') = '0'
            THEN set_config('idle_in_transaction_session_timeout', %(idle)s::text, true) END
), i AS (
    INSERT INTO outbox_inbox (consumer_group, dedupe_key, message_id, source, topic, lane, number, nth)
    SELECT %(group)s::text, %(key)s::text, %(message_id)s::uuid, %(source)s::text, %(topic)s::text, %(lane)s::smallint,
        %(number)s::bigint, %(nth)s::int
    FROM l WHERE is_mine AND is_next
    ON CONFLICT (consumer_group, dedupe_key) DO NOTHING
    RETURNING 1
)
SELECT is_mine, is_next, EXISTS (SELECT FROM i) FROM l
"""

# The same for many messages of topics without order.
CLAIM_MANY = f"""
WITH l AS MATERIALIZED (
    SELECT g.*, pg_try_advisory_xact_lock({Lock.INBOX}, hashtext(%(group)s::text || ' ' || key)) AS is_mine
    FROM unnest(%(keys)s::text[], %(message_ids)s::uuid[], %(sources)s::text[], %(topics)s::text[], %(lanes)s::smallint[],
        %(numbers)s::bigint[], %(nths)s::int[])
        WITH ORDINALITY g (key, message_id, source, topic, lane, number, nth, place)
), t AS MATERIALIZED (
    SELECT CASE WHEN %(idle)s::text IS NOT NULL AND current_setting('idle_in_transaction_session_timeout') = '0'
        THEN set_config('idle_in_transaction_session_timeout', %(idle)s::text, true) END
), i AS (
    INSERT INTO outbox_inbox (consumer_group, dedupe_key, message_id, source, topic, lane, number, nth)
    SELECT %(group)s::text, key, message_id, source, topic, lane, number, nth FROM l WHERE is_mine
    ON CONFLICT (consumer_group, dedupe_key) DO NOTHING
    RETURNING dedupe_key, message_id
)
SELECT is_mine, i.message_id IS NOT NULL
FROM t, l LEFT JOIN i ON i.dedupe_key = l.key AND i.message_id = l.message_id ORDER BY place
"""

# Another message was handled under the same dedupe key: record that the number of this one has arrived too.
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
    """The result of a claim."""

    MINE = enum.auto()
    HANDLED = enum.auto()  # by an earlier delivery
    BUSY = enum.auto()  # another process handles it now
    BEHIND = enum.auto()  # another process handles a message of its key, on an ordered topic


@dataclass(frozen=True, slots=True)
class Entry:
    """
    A message that a group is about to handle.

    Args:
        key: identifies duplicates: the message id, or the handler's own dedupe key.
        order_key: the key on an ordered topic; None on others.
    """

    arrival: DeliveryInfo
    key: str
    order_key: str | None = None

    @classmethod
    def of(cls, delivery: Delivery, key: str) -> Self:
        """Return the entry of a delivery."""
        is_ordered = bool(delivery.key) and conf.topic_settings(delivery.topic).type is TopicType.FIFO
        order_key = f"{delivery.group} {delivery.topic} {delivery.key}" if is_ordered else None
        return cls(DeliveryInfo.of(delivery), key, order_key)


def claim(entry: Entry, using: str) -> Claim:
    """
    Insert the inbox row in the caller's transaction, and limit its idle time to less than `INVISIBLE`.

    So the transaction has ended when the message is delivered again. The transaction around a test is not limited.
    """
    values = {**entry.arrival.as_parameters(), "key": entry.key, "order": entry.order_key, "idle": _idle(using)}
    cursor = database.kept_cursor(using, CLAIM)
    cursor.execute(CLAIM, values)
    is_mine, is_next, is_new = cursor.cursor.fetchone()  # the result is here already: there is no database error to translate
    if not is_mine:
        return Claim.BUSY
    if not is_next:
        return Claim.BEHIND
    return Claim.MINE if is_new else Claim.HANDLED


def claim_many(entries: Sequence[Entry], using: str) -> list[Claim]:
    """Insert inbox rows as `claim` does, in one statement. Of several entries with one key, only one can be MINE."""
    columns = columns_of([entry.arrival for entry in entries])
    keys = [entry.key for entry in entries]
    with database.bound_cursor(using) as cursor:
        cursor.execute(CLAIM_MANY, {"group": entries[0].arrival.group, "keys": keys, "idle": _idle(using), **columns})
        rows = cursor.fetchall()
    claims, seen = [], set()
    for entry, (is_mine, is_new) in zip(entries, rows, strict=True):
        name = (entry.key, entry.arrival.message_id)  # the row names the message that it was written for
        is_copy = name in seen
        seen.add(name)
        claims.append(Claim.BUSY if not is_mine else Claim.MINE if is_new and not is_copy else Claim.HANDLED)
    return claims


def _idle(using: str) -> str | None:
    """Return how many milliseconds the transaction may be idle; None inside the transaction of a test."""
    if len(connections[using].atomic_blocks) > 1:
        return None
    return _idle_within(conf.settings().consumer.invisible)


@cache
def _idle_within(invisible: timedelta) -> str:
    return str(int(max(1, invisible * IDLE_SHARE // timedelta(milliseconds=1))))


def columns_of(arrivals: Sequence[DeliveryInfo]) -> dict[str, list[Any]]:
    """Return the values of inbox rows, a list for each column."""
    names = ("message_id", "source", "topic", "lane", "number", "nth")
    return {f"{name}s": [getattr(arrival, name) for arrival in arrivals] for name in names}


def drop(entry: Entry, using: str) -> None:
    """Record that a delivery was dropped as a duplicate."""
    arrival = entry.arrival
    Duplicate.objects.using(using).create(
        consumer_group=arrival.group, message_id=arrival.message_id, topic=arrival.topic, nth=arrival.nth
    )
    with connections[using].cursor() as cursor:
        cursor.execute(ARRIVED_TOO, {**arrival.as_parameters(), "key": entry.key})
