"""Record Ctrl-C and SIGTERM at once, and handle them later at safe points, never while a process is being started."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupted(SystemExit):
    """Raised at a safe point after Ctrl-C or SIGTERM; its code is the exit code."""


class Interrupt:
    """Records signals after its creation. So a second Ctrl-C does not disturb the shutdown that the first one began."""

    def __init__(self) -> None:
        self._caught: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._record)

    def check(self) -> None:
        """Raise Interrupted if a signal has been recorded."""
        if self._caught:
            raise Interrupted(128 + self._caught[0])

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self._caught.append(signum)
