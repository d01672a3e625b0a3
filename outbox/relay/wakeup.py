"""
Wakeup: one of the idle relays of a broker is on call. It announces itself in a row, and publishers notify it on commit.

The other relays poll, and one of them goes on call when the relay on call has ended, freezes, or is busy. A notification may be
lost, and a transaction that published before the row was written and commits later sends none. Both only cost latency, since the
relay claims again when its wait is over.
"""

from __future__ import annotations

import time
from datetime import timedelta

from outbox.database import Connection
from outbox.database.locks import IS_LANE_FREE

LISTEN = "LISTEN outbox"

UNLISTEN = "UNLISTEN outbox"

# Go on call, in the broker's one row, unless another relay is. The relay on call updates the row each second; after 3 s without
# an update it counts as frozen. A long-running relay takes the place of one that is not.
ANNOUNCE = """
INSERT INTO outbox_wakeup AS on_call (broker, relay, is_long_running) VALUES (%(broker)s, %(lane)s, %(is_long_running)s)
ON CONFLICT (broker) DO UPDATE
SET relay = excluded.relay, is_long_running = excluded.is_long_running, announced_at = clock_timestamp()
WHERE on_call.relay = excluded.relay OR on_call.announced_at < clock_timestamp() - interval '3 s'
    OR excluded.is_long_running AND NOT on_call.is_long_running
"""

WITHDRAW = "DELETE FROM outbox_wakeup WHERE relay = %s"

IS_ANOTHER_ON_CALL = "SELECT EXISTS (SELECT FROM outbox_wakeup WHERE broker = %s AND relay <> %s)"

# Delete the rows of relays that died, so that publishers do not notify them. The lock of the lane of a dead relay is free.
FORGET_DEAD = f"DELETE FROM outbox_wakeup WHERE {IS_LANE_FREE.format(lane='relay')}"


class Waker:
    """
    Waits for publishers on behalf of a relay.

    A relay that has claimed nothing calls `announce()`, claims again, and only then calls `wait()`. That claim finds messages
    that were committed before the announcement; later commits notify the relay.

    Args:
        connection: a connection in autocommit, which only this waker uses.
        lane: the relay's lane.
        broker: the alias of the relay's broker.
        is_long_running: whether the relay keeps running. A long-running relay takes the place of one that ends when it is idle.
        shortest, longest: the first and the maximum wait. Each wait without a notification doubles the next one.
    """

    def __init__(
        self,
        connection: Connection,
        lane: int,
        broker: str,
        *,
        is_long_running: bool = True,
        shortest: timedelta,
        longest: timedelta,
    ) -> None:
        self._connection = connection
        self._lane = lane
        self._broker = broker
        self._is_long_running = is_long_running
        self._shortest = shortest
        self._longest = longest
        self._next_wait = shortest
        self._is_listening = False
        self.is_on_call = False
        connection.execute(WITHDRAW, [self._lane])  # the last holder of the lane may have died while it was on call

    def announce(self) -> bool:
        """Go on call, or stay on call, unless another relay of the broker is; return whether this relay is on call now."""
        arguments = {"broker": self._broker, "lane": self._lane, "is_long_running": self._is_long_running}
        self.is_on_call = self._connection.execute(ANNOUNCE, arguments).rowcount == 1
        if self.is_on_call is not self._is_listening:
            self._connection.execute(LISTEN if self.is_on_call else UNLISTEN)
            self._is_listening = self.is_on_call
        return self.is_on_call

    def withdraw(self) -> None:
        """Go off call, so that publishers send no notifications."""
        if self.is_on_call:
            self._connection.execute(WITHDRAW, [self._lane])
        self.is_on_call = False
        self._next_wait = self._shortest

    def wait(self, at_most: timedelta | None = None) -> frozenset[int]:
        """
        Wait for a notification.

        Args:
            at_most: the maximum wait, if it is shorter than the wait that is due.

        Returns:
            Ids of the topics with new messages. Empty if there was no notification, or one that names no topic.
        """
        seconds = min(self._next_wait, at_most or self._next_wait).total_seconds()
        deadline = time.monotonic() + seconds
        while (remaining := deadline - time.monotonic()) > 0:
            # This reads all notifications that have arrived. psycopg also keeps those that arrived during another statement.
            payloads = {notice.payload for notice in self._connection.notifies(timeout=remaining, stop_after=1)}
            named = [payload.partition(":") for payload in payloads]
            if not all(topic.isdecimal() for topic, _, _ in named):  # such as an empty payload; any session may notify
                return frozenset()
            if topics := frozenset(int(topic) for topic, _, broker in named if broker == self._broker):
                return topics
        self._next_wait = min(self._next_wait * 2, self._longest)
        return frozenset()

    def is_another_on_call(self) -> bool:
        """Return whether another relay of the broker is on call."""
        row = self._connection.execute(IS_ANOTHER_ON_CALL, [self._broker, self._lane]).fetchone()
        return row == (True,)


def forget_dead(connection: Connection) -> int:
    """Delete the rows of relays that died on call; return their number."""
    return connection.execute(FORGET_DEAD).rowcount
