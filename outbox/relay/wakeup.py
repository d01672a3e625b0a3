"""
Wake-up: an idle relay says so in a row, and publishers notify it as they commit.

A notification may be lost, and one that published before the row was there and committed after it sends none. Both cost
latency only: the relay claims again when its wait is over.
"""

from __future__ import annotations

from datetime import timedelta

from outbox.database import Connection
from outbox.database.locks import IS_LANE_FREE
from outbox.relay.lane import Lane

LISTEN = "LISTEN outbox"

ANNOUNCE = "INSERT INTO outbox_idle (relay) VALUES (%s) ON CONFLICT DO NOTHING"

WITHDRAW = "DELETE FROM outbox_idle WHERE relay = %s"

IS_ANYBODY_IDLE = "SELECT EXISTS (SELECT FROM outbox_idle WHERE relay <> %s)"

# Rows of relays that died: their lock is free, and each would make every publish notify nobody.
FORGET_DEAD = f"DELETE FROM outbox_idle i WHERE {IS_LANE_FREE.format(lane='i.relay')}"


class Waker:
    """
    Waits for publishers on behalf of the relay of a lane.

    Nothing claimed: `announce()`, claim again, and only then `wait()`. What committed before the announcement is found
    by that claim, what commits later notifies.

    Args:
        connection: autocommit, and this waker's own.
        shortest, longest: the first wait; each that was in vain doubles the next, up to the longest.
    """

    def __init__(self, connection: Connection, lane: Lane, *, shortest: timedelta, longest: timedelta) -> None:
        self._connection = connection
        self._lane = lane.number
        self._shortest = shortest
        self._longest = longest
        self._next_wait = shortest
        self.is_announced = False
        connection.execute(LISTEN)
        connection.execute(WITHDRAW, [self._lane])  # the lane's last holder may have died idle

    def announce(self) -> None:
        """Announce that this relay is idle."""
        self._connection.execute(ANNOUNCE, [self._lane])
        self.is_announced = True

    def withdraw(self) -> None:
        """Announce that this relay is not idle (any more), so that publishers need not notify."""
        if self.is_announced:
            self._connection.execute(WITHDRAW, [self._lane])
        self.is_announced = False
        self._next_wait = self._shortest

    def wait(self, at_most: timedelta | None = None) -> bool:
        """Wait for a publisher, at most that long; say whether one notified."""
        seconds = min(self._next_wait, at_most or self._next_wait).total_seconds()
        # All of them: psycopg keeps those that came during another statement, and would keep the rest for the next waits.
        is_woken = bool(list(self._connection.notifies(timeout=seconds, stop_after=1)))
        self._next_wait = min(self._next_wait * 2, self._longest)
        return is_woken

    def is_another_idle(self) -> bool:
        """Return whether another relay waits for publishers."""
        row = self._connection.execute(IS_ANYBODY_IDLE, [self._lane]).fetchone()
        return row == (True,)


def forget_dead(connection: Connection) -> int:
    """Delete the idle rows of relays that died; return how many."""
    return connection.execute(FORGET_DEAD).rowcount
