"""Store or end several messages in one statement, and turn its errors into results for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import psycopg
from psycopg import errors

from outbox.brokers.base import SendResult, SendStatus
from outbox.database import Connection
from outbox.embedded.client import EmbeddedClient, status_of
from outbox.errors import BrokerUnavailable

T = TypeVar("T")
Act = Callable[[Connection, Sequence[T]], list[SendResult]]


def results_of(client: EmbeddedClient, given: Sequence[T], act: Act[T]) -> list[SendResult]:
    """
    Act on all items in one statement; return a result for each.

    When the database rejects the data of one item, halve the items until it is alone, so that the others succeed.
    """
    try:
        return _act(client, given, act)
    except BrokerUnavailable as error:
        return [SendResult(SendStatus.UNAVAILABLE, reason=str(error))] * len(given)
    except psycopg.Error as error:
        status = status_of(error)
        if status is SendStatus.REFUSED and len(given) > 1:
            middle = len(given) // 2
            return results_of(client, given[:middle], act) + results_of(client, given[middle:], act)
        return [SendResult(status, reason=client.reason_of(error))] * len(given)


def _act(client: EmbeddedClient, given: Sequence[T], act: Act[T]) -> list[SendResult]:
    with client.call() as connection:
        try:
            return act(connection, given)
        except errors.DeadlockDetected:  # with another end of the same half messages in another order; nothing was done
            return act(connection, given)
