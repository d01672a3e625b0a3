"""
Messages whose last try was begun and never ended. A process handles one of them at a time.

If one of them kills the process, no other is interrupted. Otherwise messages that were interrupted together would come back
together, and be interrupted again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

EXCLUDES_SECONDS = 60.0  # a try that takes longer is slow or stuck, and no longer keeps others waiting

_at_work: list[tuple[UUID, float]] = []  # and since when
_change = threading.Lock()


@contextmanager
def alone(message_id: UUID) -> Iterator[bool]:
    """Yield whether this process handles no other such message while the block runs; a stuck try of the same does not count."""
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
