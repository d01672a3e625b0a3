"""
Wake-up: of the idle relays of a broker one is on call. It says so in a row, and publishers notify it as they commit.

The others look now and then, and take its place when it is gone, frozen, or too busy to be on call. A notification may be
lost, and one that published before the row was there and committed after it sends none. Both cost latency only: the relay
claims again when its wait is over.
"""

from __future__ import annotations

import time
from datetime import timedelta

from outbox.database import Connection
from outbox.database.locks import IS_LANE_FREE
from outbox.relay.lane import Lane

LISTEN = "LISTEN outbox"

UNLISTEN = "UNLISTEN outbox"

# One row for each broker. The relay that has it announces itself each second; one that does not is frozen.
ANNOUNCE = """
INSERT INTO outbox_idle AS i (broker, relay, is_resident) VALUES (%(broker)s, %(lane)s, %(is_resident)s)
ON CONFLICT (broker) DO UPDATE
SET relay = excluded.relay, is_resident = excluded.is_resident, announced_at = clock_timestamp()
WHERE i.relay = excluded.relay OR i.announced_at < clock_timestamp() - interval '3 s'
    OR excluded.is_resident AND NOT i.is_resident
"""

WITHDRAW = "DELETE FROM outbox_idle WHERE relay = %s"

IS_ANOTHER_ON_CALL = "SELECT EXISTS (SELECT FROM outbox_idle WHERE broker = %s AND relay <> %s)"

# Rows of relays that died: their lock is free, and each would make every publish notify nobody.
FORGET_DEAD = f"DELETE FROM outbox_idle i WHERE {IS_LANE_FREE.format(lane='i.relay')}"


class Waker:
    """
    Waits for publishers on behalf of the relay of a lane.

    Nothing claimed: `announce()`, claim again, and only then `wait()`. What committed before the announcement is found
    by that claim, what commits later notifies.

    Args:
        connection: autocommit, and this waker's own.
        broker: the alias of the relay's.
        is_resident: whether the relay stays. One that comes and goes with its work makes room for one that stays.
        shortest, longest: the first wait; each one that finds nothing doubles the next, up to the longest.
    """

    def __init__(
        self,
        connection: Connection,
        lane: Lane,
        broker: str,
        *,
        is_resident: bool = True,
        shortest: timedelta,
        longest: timedelta,
    ) -> None:
        self._connection = connection
        self._lane = lane.number
        self._broker = broker
        self._is_resident = is_resident
        self._shortest = shortest
        self._longest = longest
        self._next_wait = shortest
        self._is_listening = False
        self.is_on_call = False
        connection.execute(WITHDRAW, [self._lane])  # the lane's last holder may have died idle

    def announce(self) -> bool:
        """Be on call, unless another relay of the broker is; return whether this one is now. Another may replace it later."""
        arguments = {"broker": self._broker, "lane": self._lane, "is_resident": self._is_resident}
        self.is_on_call = self._connection.execute(ANNOUNCE, arguments).rowcount == 1
        if self.is_on_call is not self._is_listening:
            self._connection.execute(LISTEN if self.is_on_call else UNLISTEN)
            self._is_listening = self.is_on_call
        return self.is_on_call

    def withdraw(self) -> None:
        """Be on call no longer, so that publishers need not notify."""
        if self.is_on_call:
            self._connection.execute(WITHDRAW, [self._lane])
        self.is_on_call = False
        self._next_wait = self._shortest

    def wait(self, at_most: timedelta | None = None) -> frozenset[int]:
        """
        Wait to be woken, at most that long.

        Returns:
            Ids of the topics that publishers name. None of them: nobody came, or somebody let messages of any topic go.
        """
        seconds = min(self._next_wait, at_most or self._next_wait).total_seconds()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            # All of them: psycopg keeps those that came during another statement, and would keep the rest for the next waits.
            told = {notice.payload for notice in self._connection.notifies(timeout=left, stop_after=1)}
            if "" in told:
                return frozenset()
            named = (notice.partition(":") for notice in told)
            if topics := frozenset(int(topic) for topic, _, broker in named if broker == self._broker):
                return topics
        self._next_wait = min(self._next_wait * 2, self._longest)
        return frozenset()

    def is_another_on_call(self) -> bool:
        """Return whether another relay of the broker waits for publishers."""
        row = self._connection.execute(IS_ANOTHER_ON_CALL, [self._broker, self._lane]).fetchone()
        return row == (True,)


def forget_dead(connection: Connection) -> int:
    """Delete the idle rows of relays that died; return how many."""
    return connection.execute(FORGET_DEAD).rowcount
