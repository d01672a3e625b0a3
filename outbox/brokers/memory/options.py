"""OPTIONS of the memory broker."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated, Literal

import msgspec

from outbox.brokers.base import EndSemantics
from outbox.brokers.options import Options

Positive = Annotated[int, msgspec.Meta(ge=1)]


class MemoryOptions(Options, frozen=True):
    """Brokers of one NAME share what they hold; CLOCK says what time it is."""

    name: str = ""  # empty: shared with nobody
    end: EndSemantics = EndSemantics.IDEMPOTENT
    commit_window: timedelta | None = None  # as HalfMessages.commit_window; only where END is not idempotent
    drop_repeats: bool = False  # a second one-phase send of (source, message id) is accepted and shows nothing
    start: Literal["earliest", "latest"] = "earliest"  # where a new group begins
    clock: Callable[[], datetime] | None = None
    check_after: timedelta = timedelta(seconds=6)
    check_interval: timedelta = timedelta(seconds=30)
    check_limit: Positive = 15  # asked so often, a half is let lie
