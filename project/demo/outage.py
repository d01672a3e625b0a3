"""The kill of the broker itself, in the middle of the day."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MIN_HELD = 10  # messages in the queues of dead consumers before the broker is killed
DOWN_SECONDS = 3  # the time after which the broker is started again


@dataclass(frozen=True, slots=True)
class Outage:
    """
    The outage of the broker.

    Args:
        held: number of confirmed messages in the queues of dead consumers when the broker was killed.
        seconds: time from the kill until the broker answered again.
        invoices: number of invoices that were sent to the shop during the outage.
    """

    held: int
    seconds: float
    invoices: int


class Server(Protocol):
    """A server that the demo kills."""

    def kill(self) -> None: ...

    def start(self) -> object: ...


class BrokerKill:
    """
    Kills the broker, and starts it again with its data.

    Args:
        is_safe: returns whether the queues are on disk, so that they survive a crash.
        count_held: counts the messages that the broker has confirmed and some groups have not handled.
    """

    def __init__(self, server: Server, is_safe: Callable[[], bool], count_held: Callable[[Sequence[str]], int]) -> None:
        self.outage: Outage | None = None
        self._server = server
        self._is_safe = is_safe
        self._count_held = count_held
        self._held = 0
        self._killed_at = 0.0

    def is_due(self, groups: Sequence[str]) -> bool:
        """Return whether the broker has enough messages for these groups."""
        return self._count_held(groups) >= MIN_HELD and self._is_safe()

    def kill(self, groups: Sequence[str]) -> str:
        """Kill the broker; return a line of progress."""
        self._held = self._count_held(groups)
        self._killed_at = time.monotonic()
        self._server.kill()
        return f"killed the broker, with {self._held} messages in the queues of the dead consumers {' and '.join(groups)}"

    def start_again(self, invoices: int) -> str:
        """Start the broker again; return a line of progress."""
        self._server.start()
        self.outage = Outage(self._held, round(time.monotonic() - self._killed_at, 1), invoices)
        return f"the broker is back after {self.outage.seconds} s; the shop took {invoices} invoices meanwhile"
