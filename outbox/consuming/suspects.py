"""
Messages that were begun and never ended, of which a process handles one at a time.

Where one of them kills the process, the others are not to blame. Else those that were killed together would come back together,
and be killed together again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

EXCLUDES_SECONDS = 60.0  # one that is at work for longer is slow, or stuck, and keeps nobody waiting

_at_work: list[tuple[UUID, float]] = []  # and since when
_change = threading.Lock()


@contextmanager
def alone(message_id: UUID) -> Iterator[bool]:
    """Yield whether no other such message is at work in this process while the block runs; a stuck try of the same is none."""
    me = message_id, time.monotonic()
    with _change:
        is_alone = all(one == message_id or me[1] - since > EXCLUDES_SECONDS for one, since in _at_work)
        if is_alone:
            _at_work.append(me)
    try:
        yield is_alone
    finally:
        if is_alone:
            with _change:
                _at_work.remove(me)
