"""
A process that publishes numbered messages at a steady rate until it is stopped.

`python -m tests.journeys.soak.publisher FIRST RATE`, messages a second. Each number is written into a table by the transaction
of its message; every twentieth transaction is rolled back. Numbers of a key grow, since one process publishes all of them.
"""

import random
import sys
import time
from contextlib import suppress
from datetime import timedelta

import django

django.setup()

from django.db import Error, connection  # noqa: E402

from outbox import atomic, publish  # noqa: E402
from outbox.errors import HalfNotStored  # noqa: E402
from tests.journeys.soak.consumers import Later, OtherWork, Step, Work  # noqa: E402
from tests.journeys.soak.given import given  # noqa: E402

KEYS = 5
LONGEST_DELAY = 20  # seconds

NOTE = "INSERT INTO soak_published (number, topic, kind) VALUES (%s, %s, %s)"

TYPES: dict[type[Work], int] = {Work: 9, OtherWork: 4, Step: 5, Later: 2}
# What a message does, and how often. A message that is given up would leave the messages of its key behind it out of order.
KINDS = {"fine": 90, "flaky": 6, "mended": 3, "bad": 1}
KINDS_OF_STEPS = {"fine": 94, "flaky": 6}
SHARE_HALF_FIRST = 0.2  # of what may go half first


class Undone(Exception):
    """Raised to roll a transaction back."""


def publish_one(number: int, first: int) -> None:
    """Publish a message and write its number down, in one transaction."""
    [type_] = random.choices(list(TYPES), list(TYPES.values()))
    kinds = KINDS_OF_STEPS if type_ is Step else KINDS
    [kind] = random.choices(list(kinds), list(kinds.values()))
    message = type_(number=number, do=kind, key=f"{first}-{number % KEYS}")
    may_go_half_first = given["work"] == "transaction" and type_ in (Work, OtherWork)
    is_half_first = may_go_half_first and random.random() < SHARE_HALF_FIRST
    delay = timedelta(seconds=random.uniform(1, LONGEST_DELAY)) if type_ is Later else None
    with atomic(half_first=message) if is_half_first else atomic(), connection.cursor() as cursor:
        cursor.execute(NOTE, [number, type_._meta.topic, kind])
        if not is_half_first:
            publish(message, delay=delay)
        if number % 20 == 0:
            raise Undone


def main() -> None:
    """Publish for ever."""
    first = number = int(sys.argv[1])
    pause = 1 / float(sys.argv[2])
    due_at = time.monotonic()
    while True:
        with suppress(Undone, HalfNotStored, Error):
            publish_one(number, first)
        number += 1
        due_at += pause
        time.sleep(max(0.0, due_at - time.monotonic()))


if __name__ == "__main__":
    main()
