"""
A process that publishes numbered messages until it is stopped. `python -m tests.journeys.kafka.publisher FIRST`.

Each number is written into a table by the transaction of its message, and every tenth transaction is rolled back. The numbers of
a key grow, since one process publishes all of them.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import suppress

import django

django.setup()

from django.db import Error, connection  # noqa: E402

from outbox import atomic, publish_raw  # noqa: E402
from tests.journeys.kafka.given import given  # noqa: E402

PAUSE = 0.004  # seconds
KEYS = 7
NOTE = "INSERT INTO storm_published (number) VALUES (%s)"


class Undone(Exception):
    """Raised to roll a transaction back."""


def publish(number: int, first: int) -> None:
    """Publish a message and write its number down, in one transaction."""
    with atomic(), connection.cursor() as cursor:
        topic = random.choice([given["ordered"], *given["plain"]])
        publish_raw(topic, {"number": number}, key=f"{first}-{number % KEYS}")
        cursor.execute(NOTE, [number])
        if number % 10 == 0:
            raise Undone


def main() -> None:
    """Publish for ever."""
    first = number = int(sys.argv[1])
    while True:
        with suppress(Undone, Error):
            publish(number, first)
        number += 1
        time.sleep(PAUSE)


if __name__ == "__main__":
    main()
