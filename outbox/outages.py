"""
Outages of databases and brokers: the errors that loops expect, and how long loops wait before they try again.

Relays, consumers and check loops share both. For a message whose handler failed, the consumer's `RetryPolicy` has the delays.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from random import random

import msgspec
import psycopg
from django.db import InterfaceError, OperationalError

from outbox.errors import BrokerUnavailable

OUTAGES = (psycopg.OperationalError, psycopg.InterfaceError, OperationalError, InterfaceError, BrokerUnavailable)

Random = Callable[[], float]

MAX_DOUBLINGS = 32  # large enough to reach every limit in use, and small enough not to overflow


class Backoff(msgspec.Struct, frozen=True):
    """
    Exponential backoff with full jitter: a random wait between 0 and base x 2^failures, so that retries of processes spread out.

    Args:
        base: the longest wait after the first failure.
        limit: the longest wait after any failure.
        random: returns a number from 0 to below 1.
    """

    base: timedelta
    limit: timedelta
    random: Random = random

    def __call__(self, failures: int) -> timedelta:
        """Return the wait after a failure that was preceded by `failures` others in a row."""
        longest = min(self.limit, self.base * (1 << min(failures, MAX_DOUBLINGS)))
        return longest * self.random()


# The limit is short, so that the first message after an outage is sent and handled within 5 s.
BACKOFF = Backoff(timedelta(milliseconds=200), timedelta(seconds=2))
