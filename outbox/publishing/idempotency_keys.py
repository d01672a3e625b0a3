"""Idempotency keys: of a topic's messages with the same key, only the first is written, and the others get its receipt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias
from uuid import UUID

from django.db.backends.utils import CursorWrapper

from outbox import conf
from outbox.message import Receipt
from outbox.publishing.draft import Draft

TopicAndKey: TypeAlias = tuple[int, str]
"""The id of a topic, and an idempotency key of that topic."""

# Take the idempotency keys that are new or expired, and return the ids of the messages that got their key. The statement waits
# for an unfinished transaction that has taken one of the keys, so all publishers take keys in the same order.
TAKE = """
INSERT INTO outbox_idempotency_key AS d (topic_id, idempotency_key, message_id, expires_at)
SELECT topic_id, idempotency_key, message_id, clock_timestamp() + %s
FROM unnest(%s::int[], %s::text[], %s::uuid[]) AS g (topic_id, idempotency_key, message_id) ORDER BY topic_id, idempotency_key
ON CONFLICT (topic_id, idempotency_key) DO UPDATE SET message_id = excluded.message_id, expires_at = excluded.expires_at
WHERE d.expires_at <= clock_timestamp()
RETURNING message_id
"""

# Find the messages that have taken the keys before. This is a separate statement, so that it sees rows whose commit TAKE waited
# for. The message row may be missing, since its daily partition may have been dropped.
FIND_FIRST = """
SELECT d.topic_id, d.idempotency_key, d.message_id, coalesce(m.key, '')
FROM unnest(%s::int[], %s::text[]) AS g (topic_id, idempotency_key)
JOIN outbox_idempotency_key d USING (topic_id, idempotency_key) LEFT JOIN outbox_message m ON m.id = d.message_id
"""


def take_idempotency_keys(cursor: CursorWrapper, drafts: Iterable[tuple[TopicAndKey, Draft]]) -> dict[UUID, Receipt]:
    """
    Take the idempotency keys of drafts, with one statement, and a second one if other messages have some of the keys.

    Returns:
        For the id of each draft that must not be written, the receipt of the first message with its key.
    """
    drafts = list(drafts)
    first: dict[TopicAndKey, Draft] = {}
    for pair, draft in drafts:
        first.setdefault(pair, draft)
    topics, keys = [topic for topic, _ in first], [key for _, key in first]
    values: list[Any] = [conf.settings().idempotency_retention, topics, keys, [draft.id for draft in first.values()]]
    cursor.execute(TAKE, values)
    succeeded = {message_id for (message_id,) in cursor.fetchall()}
    receipts = {pair: Receipt(draft.id, draft.topic, draft.key, is_duplicate=True) for pair, draft in first.items()}
    if len(succeeded) < len(first):
        taken = [pair for pair, draft in first.items() if draft.id not in succeeded]
        cursor.execute(FIND_FIRST, [[topic for topic, _ in taken], [key for _, key in taken]])
        for topic, key, message_id, message_key in cursor.fetchall():
            receipts[topic, key] = Receipt(message_id, first[topic, key].topic, message_key, is_duplicate=True)
    return {draft.id: receipts[pair] for pair, draft in drafts if draft is not first[pair] or draft.id not in succeeded}
