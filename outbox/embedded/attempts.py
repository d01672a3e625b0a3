"""One attempt at a batch of messages or ends, and what its errors mean for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import psycopg
from psycopg import errors

from outbox.brokers.base import SendResult, SendStatus
from outbox.database import Connection
from outbox.embedded.client import Client, reason_of, status_of
from outbox.errors import BrokerUnavailable

T = TypeVar("T")
Act = Callable[[Connection, Sequence[T]], list[SendResult]]


def attempt(link: Client, given: Sequence[T], act: Act[T]) -> list[SendResult]:
    """
    Act on all in one statement; give an outcome for each.

    When the database refuses the data of one, the batch is halved until that one stands alone: its fellows go.
    """
    try:
        return _act(link, given, act)
    except BrokerUnavailable as error:
        return [SendResult(SendStatus.UNAVAILABLE, reason=str(error))] * len(given)
    except psycopg.Error as error:
        verdict = status_of(error)
        if verdict is SendStatus.REFUSED and len(given) > 1:
            middle = len(given) // 2
            return attempt(link, given[:middle], act) + attempt(link, given[middle:], act)
        return [SendResult(verdict, reason=reason_of(error))] * len(given)


def _act(link: Client, given: Sequence[T], act: Act[T]) -> list[SendResult]:
    with link.call() as connection:
        try:
            return act(connection, given)
        except errors.DeadlockDetected:  # two ends of the same halves, taken in different orders; nothing was done
            return act(connection, given)
