"""OPTIONS of the memory broker."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Annotated, Literal

import msgspec

from outbox.brokers.base import EndSemantics
from outbox.brokers.options import BrokerOptions

Positive = Annotated[int, msgspec.Meta(ge=1)]


class MemoryOptions(BrokerOptions, frozen=True):
    """Brokers with the same NAME share their messages; CLOCK returns the current time."""

    name: str = ""  # empty: messages are not shared
    end: EndSemantics = EndSemantics.IDEMPOTENT  # the effect of a second end of a half message
    commit_window: timedelta | None = None  # as HalfMessages.commit_window; only if END is not idempotent
    start: Literal["earliest", "latest"] = "earliest"  # where a group begins to read a topic
    clock: Callable[[], datetime] | None = None  # by default the system's clock
    check_after: timedelta = timedelta(seconds=6)  # age of a half message at its first check-back
    check_interval: timedelta = timedelta(seconds=30)  # time between check-backs
    check_limit: Positive = 15  # number of check-backs
    transactions: bool = False  # whether relays send one-phase messages in transactions
