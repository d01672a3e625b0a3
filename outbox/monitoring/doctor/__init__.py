"""
The doctor: looks at everything that must be there for messages to travel, and says what to do about what is not.

It sends nothing and takes no lane. What waits and what failed is `status.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

from outbox.monitoring.doctor import brokers, configuration, databases, endpoint, processes, wakeups
from outbox.monitoring.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]


def examine() -> Iterator[Finding]:
    """Look at the configuration, then at what it names; each finding comes as soon as it is known."""
    found = list(configuration.examine())
    yield from found
    if any(one.level is Level.ERROR for one in found):  # nothing below could be named
        return
    for room in (databases, brokers, processes, wakeups, endpoint):
        yield from room.examine()
