"""
An exception that is not the database's, raised in the middle of whatever Django says to PostgreSQL: a time limit, a signal's.

Django's connection may be left inside the transaction then, with autocommit off, where later blocks commit nothing.
"""

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import psycopg
from django.db import connections


class TimeIsOver(Exception):
    """As Celery's SoftTimeLimitExceeded: no error of the database."""


class Place(enum.StrEnum):
    """Where in a call the exception comes: nothing is sent yet; it is sent and not answered; it is answered."""

    BEFORE = "before"
    AMID = "amid"
    BEHIND = "behind"


class Bomb:
    """Raises at a certain call to PostgreSQL. `has_gone_off`: since it was armed."""

    def __init__(self) -> None:
        self.calls, self.nth, self.place = 0, 0, Place.BEFORE
        self.has_gone_off = False

    def arm(self, nth: int, place: Place) -> None:
        """Raise at the nth call from now on, once."""
        self.calls, self.nth, self.place = 0, nth, place
        self.has_gone_off = False

    def disarm(self) -> None:
        """Raise no more."""
        self.nth = 0

    def numbers(self, *, at_least: int) -> Iterator[int]:
        """Count calls from the first one on, until the code under test has fewer; what follows is done without a bomb."""
        for nth in count(1):
            yield nth
            if not self.has_gone_off:
                break
        assert nth > at_least


def is_djangos(connection: Any) -> bool:
    """Return whether it is the one under Django's, of this thread."""
    return connection is connections["default"].connection


@contextmanager
def planted(is_meant: Callable[[Any], bool] = is_djangos) -> Iterator[Bomb]:
    """Route all calls to PostgreSQL over certain connections through a bomb; Django's connection is a new one behind it."""
    bomb = Bomb()
    wait = psycopg.Connection.wait

    def count_and_wait(connection: Any, steps: Any, *arguments: Any, **named: Any) -> Any:
        if not is_meant(connection):
            return wait(connection, steps, *arguments, **named)
        bomb.calls += 1
        if bomb.calls != bomb.nth:
            return wait(connection, steps, *arguments, **named)
        bomb.has_gone_off = True
        if bomb.place is Place.AMID:
            with suppress(StopIteration):
                next(steps)
            steps.close()
        elif bomb.place is Place.BEHIND:
            wait(connection, steps, *arguments, **named)
        raise TimeIsOver

    psycopg.Connection.wait = count_and_wait  # type: ignore[assignment, method-assign]
    try:
        yield bomb
    finally:
        psycopg.Connection.wait = wait  # type: ignore[method-assign]
        connections["default"].close()
        del connections["default"]
