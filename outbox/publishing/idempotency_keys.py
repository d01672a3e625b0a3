"""Idempotency keys: of the messages of a topic with the same one, the first is written and the others get its receipt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias
from uuid import UUID

from django.db.backends.utils import CursorWrapper

from outbox import conf
from outbox.message import Receipt
from outbox.publishing.draft import Draft

Place: TypeAlias = tuple[int, str]
"""The id of a topic, and an idempotency key there."""

# Takes the idempotency keys that are new or expired; returns the messages that got theirs. A concurrent publisher of a key is
# waited for, so all take them in one order.
TAKE = """
INSERT INTO outbox_idempotency_key AS d (topic_id, idempotency_key, message_id, expires_at)
SELECT topic_id, idempotency_key, message_id, clock_timestamp() + %s
FROM unnest(%s::int[], %s::text[], %s::uuid[]) AS g (topic_id, idempotency_key, message_id) ORDER BY topic_id, idempotency_key
ON CONFLICT (topic_id, idempotency_key) DO UPDATE SET message_id = excluded.message_id, expires_at = excluded.expires_at
WHERE d.expires_at <= clock_timestamp()
RETURNING message_id
"""

# The messages that have idempotency keys. A statement of its own: it sees what the one before waited for. A message's day may
# have been dropped.
FIND_FIRST = """
SELECT d.topic_id, d.idempotency_key, d.message_id, coalesce(m.key, '')
FROM unnest(%s::int[], %s::text[]) AS g (topic_id, idempotency_key)
JOIN outbox_idempotency_key d USING (topic_id, idempotency_key) LEFT JOIN outbox_message m ON m.id = d.message_id
"""


def take_idempotency_keys(cursor: CursorWrapper, drafts: Iterable[tuple[Place, Draft]]) -> dict[UUID, Receipt]:
    """
    Take the idempotency keys of drafts: one statement, and a second where some are taken.

    Returns:
        The ids of the drafts that are not to be written, with the receipts of the messages that were first.
    """
    drafts = list(drafts)
    first: dict[Place, Draft] = {}
    for place, draft in drafts:
        first.setdefault(place, draft)
    topics, keys = [topic for topic, _ in first], [key for _, key in first]
    values: list[Any] = [conf.settings().idempotency_retention, topics, keys, [draft.id for draft in first.values()]]
    cursor.execute(TAKE, values)
    got = {message_id for (message_id,) in cursor.fetchall()}
    receipts = {place: Receipt(draft.id, draft.topic, draft.key, is_duplicate=True) for place, draft in first.items()}
    if len(got) < len(first):
        taken = [place for place, draft in first.items() if draft.id not in got]
        cursor.execute(FIND_FIRST, [[topic for topic, _ in taken], [key for _, key in taken]])
        for topic, key, message_id, message_key in cursor.fetchall():
            receipts[topic, key] = Receipt(message_id, first[topic, key].topic, message_key, is_duplicate=True)
    return {draft.id: receipts[place] for place, draft in drafts if draft is not first[place] or draft.id not in got}
