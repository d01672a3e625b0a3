"""
Lanes: each relay holds a small number exclusively, by a session lock, and numbers its messages in that lane.

The same lock shows other relays at once that a relay has died. It needs a direct connection: a pooler in transaction mode
shares a session, and its locks, among clients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from outbox.batches.steps import release_left
from outbox.database import Connection
from outbox.database.locks import Lock
from outbox.errors import LaneNotHeld

UNLOCK = f"SELECT pg_advisory_unlock({Lock.LANE}, %s)"

TRY_LOCK = f"SELECT pg_try_advisory_lock({Lock.LANE}, %s)"


def take_lane(connection: Connection, *, lanes: int, last: Collection[int] = ()) -> int:
    """
    Take the lowest free lane for this connection, until it closes, and release the batches that its last holder left behind.

    Args:
        lanes: how many there are; they are numbered from 1.
        last: lanes that are only taken where no other is free.

    Raises:
        LaneNotHeld: other relays hold all of them.
    """
    for number in sorted(range(1, lanes + 1), key=lambda number: (number in last, number)):
        if _try_lock(connection, number):
            release_left(connection, number)
            return number
    raise LaneNotHeld(
        f"All {lanes} lanes of database {connection.info.dbname!r} are held by other relays.",
        hint="Stop some, or raise OUTBOX['RELAY']['LANES'].",
    )


@contextmanager
def holding_lane(connection: Connection, number: int) -> Iterator[bool]:
    """Hold one lane more in the block, where no other connection holds it; yield whether it is held."""
    is_held = _try_lock(connection, number)
    try:
        yield is_held
    finally:
        if is_held:  # a lock that was held already is counted
            connection.execute(UNLOCK, [number])


def _try_lock(connection: Connection, number: int) -> bool:
    """Lock a lane for this connection, if no other one holds it; return whether it is locked."""
    return connection.execute(TRY_LOCK, [number]).fetchone() == (True,)
