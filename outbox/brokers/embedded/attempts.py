"""One attempt at a batch of messages or ends, and what its errors mean for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import psycopg
from psycopg import errors

from outbox.brokers.base import Outcome, Verdict
from outbox.brokers.embedded.client import Link, verdict_of
from outbox.database import Connection
from outbox.errors import BrokerUnavailable

T = TypeVar("T")
Act = Callable[[Connection, Sequence[T]], list[Outcome]]


def attempt(link: Link, given: Sequence[T], act: Act[T]) -> list[Outcome]:
    """
    Act on all in one statement; give an outcome for each.

    When the database refuses the data of one, the batch is halved until that one stands alone: its fellows go.
    """
    try:
        return _act(link, given, act)
    except BrokerUnavailable as error:
        return [Outcome(Verdict.UNAVAILABLE, reason=str(error))] * len(given)
    except psycopg.Error as error:
        verdict = verdict_of(error)
        if verdict is Verdict.REFUSED and len(given) > 1:
            middle = len(given) // 2
            return attempt(link, given[:middle], act) + attempt(link, given[middle:], act)
        return [Outcome(verdict, reason=f"{type(error).__name__}: {error}")] * len(given)


def _act(link: Link, given: Sequence[T], act: Act[T]) -> list[Outcome]:
    try:
        return act(link.connection(), given)
    except errors.DeadlockDetected:  # two ends of the same halves, taken in different orders; nothing was done
        return act(link.connection(), given)
