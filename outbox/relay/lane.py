"""
A lane is a small number that one relay holds alone, by a session lock. Messages are numbered per topic and lane, without gaps.

PostgreSQL releases the lock when the relay's connection ends, so other relays see at once that the relay has died. The lock needs
a direct connection, since a pooler in transaction mode shares a session, and its locks, among clients.
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
    Take the lowest free lane for this connection, until it closes; release batches that the lane's last holder had claimed.

    Args:
        lanes: the number of lanes; they are numbered from 1.
        last: lanes that are only taken if no other is free.

    Raises:
        LaneNotHeld: other relays hold all lanes.
    """
    for number in sorted(range(1, lanes + 1), key=lambda number: (number in last, number)):
        if _try_lock(connection, number):
            release_left(connection, number)
            return number
    raise LaneNotHeld(
        f"All {lanes} lanes of database {connection.info.dbname!r} are held by other relays.",
        hint="Stop some relays, or raise OUTBOX['RELAY']['LANES'].",
    )


@contextmanager
def holding_lane(connection: Connection, number: int) -> Iterator[bool]:
    """Hold another lane in the block, if no other connection holds it; yield whether it is held."""
    is_held = _try_lock(connection, number)
    try:
        yield is_held
    finally:
        if is_held:  # if this connection held the lock before, it still does, since locks of a session are counted
            connection.execute(UNLOCK, [number])


def _try_lock(connection: Connection, number: int) -> bool:
    """Lock a lane for this connection, unless another one holds it; return whether it is locked now."""
    return connection.execute(TRY_LOCK, [number]).fetchone() == (True,)
