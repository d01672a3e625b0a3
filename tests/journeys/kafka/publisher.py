"""
Publishes numbered messages.

Each number is written into a table by the transaction of its message, and every tenth transaction is rolled back. The numbers of
a key grow, since one process publishes all of them.
"""

import random

from django.db import connection

from outbox import atomic, publish_raw
from tests.journeys.kafka.given import given
from tests.journeys.publish import STEP, Undone

PAUSE = 0.004  # seconds
KEYS = 7
NOTE = "INSERT INTO storm_published (number) VALUES (%s)"


def publish(number: int) -> None:
    """Publish a message and write its number down, in one transaction."""
    with atomic(), connection.cursor() as cursor:
        topic = random.choice([given["ordered"], *given["plain"]])
        publish_raw(topic, {"number": number}, key=f"{number // STEP}-{number % KEYS}")
        cursor.execute(NOTE, [number])
        if number % 10 == 0:
            raise Undone
