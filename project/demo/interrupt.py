"""Ctrl-C and SIGTERM: recorded at once, and handled at safe places, such as not while a process is being started."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupted(SystemExit):
    """Raised at a safe place after Ctrl-C or SIGTERM; its code is the exit code."""


class Interrupt:
    """Records signals from its creation on. A second Ctrl-C does not disturb the shutdown that the first one began."""

    def __init__(self) -> None:
        self._caught: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self._caught:
            raise Interrupted(128 + self._caught[0])

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._caught.append(signum)
