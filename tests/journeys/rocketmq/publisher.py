"""
A process that publishes numbered messages until it is stopped.

`python -m tests.journeys.rocketmq.publisher FIRST relay|half-first`.

Each number is written into a table by the transaction of its message; every fifth transaction is rolled back.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress

import django

django.setup()

from django.db import Error, connection  # noqa: E402

from outbox import atomic, publish_raw  # noqa: E402
from outbox.errors import HalfNotStored  # noqa: E402
from tests.journeys.rocketmq.consumers import WORK, Numbered  # noqa: E402

PAUSE = 0.02  # seconds
NOTE = "INSERT INTO journey_published VALUES (%s)"


class Undone(Exception):
    """Raised to roll a transaction back."""


def publish(number: int, *, is_half_first: bool) -> None:
    """Write a number down and publish it, in one transaction."""
    with atomic(half_first=Numbered(number=number)) if is_half_first else atomic():
        with connection.cursor() as cursor:
            cursor.execute(NOTE, [number])
        if not is_half_first:
            publish_raw(WORK, {"number": number})
        if number % 5 == 0:
            raise Undone


def main() -> None:
    """Publish for ever."""
    number, is_half_first = int(sys.argv[1]), sys.argv[2] == "half-first"
    while True:
        with suppress(Undone, HalfNotStored, Error):
            publish(number, is_half_first=is_half_first)
        number += 1
        time.sleep(PAUSE)


if __name__ == "__main__":
    main()
