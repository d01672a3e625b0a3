"""
Locks of the keys of ordered topics. They give the tickets of a key the order in which the publishers of the key commit.

A publisher of a key waits until the previous publisher of this key has committed; publishers of other keys do not wait. Each lock
takes space in PostgreSQL's shared memory, which has room for about 10,000 locks by default. So a transaction with very many keys
locks their topics instead: it waits for all other publishers of these topics, and they wait for it.

A transaction that has already locked keys does not wait for topics, since two such transactions would wait for each other. If the
topics are not free, it locks further keys instead. So pass very many keys to one `publish_many()`.
"""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

import msgspec
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from outbox.database.locks import Lock

MAX_KEYS = 1000  # a transaction with more keys locks topics instead

# Lock a key; return its order key (the hash by which tickets are claimed in order), and the id of the transaction.
LOCK_KEY = f"""
SELECT pg_advisory_xact_lock_shared({Lock.TOPIC_KEYS}, %s), pg_advisory_xact_lock({Lock.KEY}, hashtext(%s)),
    hashtextextended(%s, %s), pg_current_xact_id()::text
"""

# Lock many keys in sorted order, so that two publishers of the same keys do not wait for each other.
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


class _LockedKeys(msgspec.Struct):
    """
    The number of keys that a connection has locked in a transaction.

    The number may be too large: keys are counted again if they are locked again, and after a savepoint was rolled back.
    """

    transaction: str = ""
    keys: int = 0

    def add(self, transaction: str, keys: int) -> None:
        """Count more keys; in another transaction than before, start at 0."""
        if transaction != self.transaction:
            self.transaction, self.keys = transaction, 0
        self.keys += keys


_locked_keys: WeakKeyDictionary[BaseDatabaseWrapper, _LockedKeys] = WeakKeyDictionary()


def lock_key(cursor: CursorWrapper, using: str, topic: int, key: str) -> int:
    """
    Lock a key until the transaction ends; return its order key, the hash of topic and key that its ticket has.

    Args:
        topic: the topic's id.
    """
    locked = _locked_keys.setdefault(connections[using], _LockedKeys())
    if _has_locked_topics(cursor, locked, [topic], 1):
        cursor.execute(ORDER_KEY, [key, topic])
        return int(cursor.fetchone()[0])
    cursor.execute(LOCK_KEY, [topic, key, key, topic])
    _, _, order_key, transaction = cursor.fetchone()
    locked.add(transaction, 1)
    return int(order_key)


def lock_keys(cursor: CursorWrapper, using: str, topics: Collection[int], keys: Collection[str]) -> None:
    """
    Lock keys until the transaction ends.

    Args:
        topics: the ids of the topics that have these keys.
    """
    distinct, locked = list(set(keys)), _locked_keys.setdefault(connections[using], _LockedKeys())
    if _has_locked_topics(cursor, locked, topics, len(distinct)):
        return
    cursor.execute(LOCK_KEYS, [list(topics), distinct])
    locked.add(cursor.fetchone()[1], len(distinct))


def _has_locked_topics(cursor: CursorWrapper, locked: _LockedKeys, topics: Collection[int], new_keys: int) -> bool:
    """Lock the topics if with `new_keys` the transaction would have locked too many keys; return whether they are locked."""
    if locked.keys + new_keys <= MAX_KEYS:
        return False
    cursor.execute(THIS_TRANSACTION)  # the count may be that of an earlier transaction
    locked.add(cursor.fetchone()[0], 0)
    if locked.keys + new_keys <= MAX_KEYS:
        return False
    if locked.keys:
        cursor.execute(TRY_TOPICS, [list(topics)])
        return bool(cursor.fetchone()[0])
    cursor.execute(LOCK_TOPICS, [list(topics)])
    locked.keys = new_keys
    return True
