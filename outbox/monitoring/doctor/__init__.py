"""
The doctor checks everything that messages need to be delivered, and says how to correct it.

It sends nothing and takes no lane. What `outbox_status` says needs attention is among its findings.
"""

from __future__ import annotations

from collections.abc import Iterator

from outbox.monitoring.doctor import brokers, configuration, databases, endpoint, processes, wakeups
from outbox.monitoring.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "check"]


def check() -> Iterator[Finding]:
    """Check the configuration, then what it refers to; yield each finding as soon as it is known."""
    found = list(configuration.check())
    yield from found
    if any(one.level is Level.ERROR for one in found):  # the checks below need valid settings
        return
    for module in (databases, brokers, processes, wakeups, endpoint):
        yield from module.check()
