"""The steps of a job: each is logged when it begins, and the report has its seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Steps:
    """
    Measures the steps of a job by the wall clock, one after the other.

    Args:
        log: called with the name of each step, and by the step with lines about its progress.
    """

    def __init__(self, log: Callable[[str], None] = lambda text: None) -> None:
        self.log = log
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure a step: the block."""
        self.log(name)
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 2)
