"""Days of the message table, made ahead so that no publish ever waits for one."""

from __future__ import annotations


def make_days(using: str) -> None:
    """Make the partitions of the days ahead."""
