"""
Locks of the keys of ordered topics: the tickets of a key stand in the order of the commits of its publishers.

A publisher of a key waits until its last publisher has committed; publishers of other keys pass. Each key is a lock in
PostgreSQL's shared memory, which holds about 10,000 of them by default, so a transaction with very many keys locks their topics
instead: it waits for all other publishers of these topics, and they for it. A transaction that holds keys already does not wait,
since two of them would wait for each other: where the topics are not free, it locks key by key. So give very many keys to one
`publish_many()`.
"""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

import msgspec
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from outbox.database.locks import Lock

MOST_KEYS = 1000  # of a transaction that are locked one by one

# Also returns the order key, and names the transaction.
LOCK_KEY = f"""
SELECT pg_advisory_xact_lock_shared({Lock.TOPIC_KEYS}, %s), pg_advisory_xact_lock({Lock.KEY}, hashtext(%s)),
    hashtextextended(%s, %s), pg_current_xact_id()::text
"""

# The same for many keys, sorted, so that two publishers of the same keys do not wait for each other.
LOCK_KEYS = f"""
WITH t AS MATERIALIZED (
    SELECT count(pg_advisory_xact_lock_shared({Lock.TOPIC_KEYS}, id))
    FROM (SELECT DISTINCT unnest(%s::int[]) AS id ORDER BY 1) i)
SELECT pg_advisory_xact_lock({Lock.KEY}, hash), pg_current_xact_id()::text
FROM t, (SELECT DISTINCT hashtext(unnest(%s::text[])) AS hash ORDER BY 1) k
"""

LOCK_TOPICS = f"""
SELECT pg_advisory_xact_lock({Lock.TOPIC_KEYS}, id) FROM (SELECT DISTINCT unnest(%s::int[]) AS id ORDER BY 1) i
"""

TRY_TOPICS = f"""
SELECT bool_and(pg_try_advisory_xact_lock({Lock.TOPIC_KEYS}, id)) FROM (SELECT DISTINCT unnest(%s::int[]) AS id ORDER BY 1) i
"""

THIS_TRANSACTION = "SELECT pg_current_xact_id()::text"

ORDER_KEY = "SELECT hashtextextended(%s, %s)"


class _Held(msgspec.Struct):
    """How many keys a connection has locked, at most, in the transaction that it was in then."""

    transaction: str = ""
    keys: int = 0

    def note(self, transaction: str, keys: int) -> None:
        """Count more keys."""
        if transaction != self.transaction:
            self.transaction, self.keys = transaction, 0
        self.keys += keys


_held: WeakKeyDictionary[BaseDatabaseWrapper, _Held] = WeakKeyDictionary()


def lock_key(cursor: CursorWrapper, using: str, topic: int, key: str) -> int:
    """
    Lock a key until the transaction ends; return its order key.

    Args:
        topic: the topic's id.
    """
    held = _held.setdefault(connections[using], _Held())
    if _has_locked_topics(cursor, held, [topic], 1):
        cursor.execute(ORDER_KEY, [key, topic])
        return int(cursor.fetchone()[0])
    cursor.execute(LOCK_KEY, [topic, key, key, topic])
    _, _, order_key, transaction = cursor.fetchone()
    held.note(transaction, 1)
    return int(order_key)


def lock_keys(cursor: CursorWrapper, using: str, topics: Collection[int], keys: Collection[str]) -> None:
    """
    Lock keys until the transaction ends.

    Args:
        topics: the ids of the topics that have them.
    """
    chosen, held = list(set(keys)), _held.setdefault(connections[using], _Held())
    if _has_locked_topics(cursor, held, topics, len(chosen)):
        return
    cursor.execute(LOCK_KEYS, [list(topics), chosen])
    held.note(cursor.fetchone()[1], len(chosen))


def _has_locked_topics(cursor: CursorWrapper, held: _Held, topics: Collection[int], more: int) -> bool:
    """Lock topics instead of more of their keys, where the transaction would lock too many; return whether they are locked."""
    if held.keys + more <= MOST_KEYS:
        return False
    cursor.execute(THIS_TRANSACTION)  # asked only where it is near
    held.note(cursor.fetchone()[0], 0)
    if held.keys + more <= MOST_KEYS:
        return False
    if held.keys:
        cursor.execute(TRY_TOPICS, [list(topics)])
        return bool(cursor.fetchone()[0])
    cursor.execute(LOCK_TOPICS, [list(topics)])
    held.keys = more
    return True
