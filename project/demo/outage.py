"""The kill of the broker itself, in the middle of the day."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

LEAST_HELD = 10  # messages in the queues of dead consumers
DOWN_SECONDS = 3  # until it is started again


@dataclass(frozen=True, slots=True)
class Outage:
    """
    What the broker had when it was killed, and what happened until it was back.

    Args:
        held: messages in the queues of dead consumers, all of them confirmed.
        seconds: until it answered again.
        invoices: sent to the shop meanwhile.
    """

    held: int
    seconds: float
    invoices: int


class Server(Protocol):
    """What the demo kills."""

    def kill(self) -> None: ...

    def start(self) -> object: ...


class BrokerKill:
    """
    Kills the broker, and starts it again on its data.

    Args:
        is_safe: returns whether the queues are on the disk, so that they outlast a crash.
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
        return self._count_held(groups) >= LEAST_HELD and self._is_safe()

    def kill(self, groups: Sequence[str]) -> str:
        """Kill it. Return what is to be shown."""
        self._held = self._count_held(groups)
        self._killed_at = time.monotonic()
        self._server.kill()
        return f"killed the broker, with {self._held} messages in the queues of the dead consumers {' and '.join(groups)}"

    def start_again(self, invoices: int) -> str:
        """Start it. Return what is to be shown."""
        self._server.start()
        self.outage = Outage(self._held, round(time.monotonic() - self._killed_at, 1), invoices)
        return f"the broker is back after {self.outage.seconds} s; the shop took {invoices} invoices meanwhile"
