"""
Publishes numbered messages, half first where the last argument says `half-first`.

Each number is written into a table by the transaction of its message; every fifth transaction is rolled back.
"""

import sys

from django.db import connection

from outbox import atomic, publish_raw
from tests.journeys.publish import Undone
from tests.journeys.rocketmq.consumers import WORK, Numbered

PAUSE = 0.02  # seconds
NOTE = "INSERT INTO journey_published VALUES (%s)"
IS_HALF_FIRST = sys.argv[-1] == "half-first"


def publish(number: int) -> None:
    """Write a number down and publish it, in one transaction."""
    with atomic(half_first=Numbered(number=number)) if IS_HALF_FIRST else atomic():
        with connection.cursor() as cursor:
            cursor.execute(NOTE, [number])
        if not IS_HALF_FIRST:
            publish_raw(WORK, {"number": number})
        if number % 5 == 0:
            raise Undone
