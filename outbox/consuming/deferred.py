"""
Deferred messages: what a group knows and has not ended.

A message that a group could not handle at its first delivery is stored here, and only then acknowledged. Then the broker is done
with it. Source: docs/explanation/deliveries.md.
"""

from __future__ import annotations

import enum
from datetime import UTC, datetime

HELD = datetime(9999, 1, 1, tzinfo=UTC)  # `due_at` of a message that an operator holds


class Reason(enum.StrEnum):
    """Why a message was deferred."""

    FAILED = "failed"  # its handler raised, or it cannot be read
    AGAIN = "again"  # it was delivered before, and may have killed a process
    BEHIND = "behind"  # an earlier message of its key is deferred, or is being handled
    ELSEWHERE = "elsewhere"  # another process handles it
    NO_HANDLER = "no handler"  # this process has none
    STOP = "stop"  # the worker was stopped
    SLOW = "slow"  # it waited behind a slow handler
    SERVER = "server"  # the broker's server gave it up
