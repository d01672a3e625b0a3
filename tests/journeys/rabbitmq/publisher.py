"""
Publishes numbered messages of all kinds to all topics.

Each number is written into a table by the transaction of its message; every fifth transaction is rolled back. Numbers of a key
grow, since one process publishes all of them.
"""

from __future__ import annotations

import random
from datetime import timedelta

from django.db import connection

from outbox import atomic, publish_raw
from tests.journeys.publish import STEP, Undone
from tests.journeys.rabbitmq.given import given, names

ALL = names(given["unique"])

PAUSE = 0.04  # seconds
KEYS = 3

NOTE = "INSERT INTO storm_published (number, message_id, topic, kind, key) VALUES (%s, %s, %s, %s, %s)"

TOPICS = {ALL.work: 10, ALL.bulk: 5, ALL.steps: 4, ALL.later: 2, ALL.spare: 3}
# What a message does, and how often.
KINDS: dict[str, dict[str, float]] = {
    ALL.work: {"fine": 300, "flaky": 30, "put off": 15, "bad": 12, "rejected": 6, "loop": 1, "stuck": 0.5},
    ALL.bulk: {"fine": 100, "bad": 2},
    ALL.steps: {"fine": 50, "rejected": 1},
    ALL.later: {"fine": 1},
    ALL.spare: {"fine": 1},
}


def publish(number: int) -> None:
    """Publish a message and write its number down, in one transaction."""
    [topic] = random.choices(list(TOPICS), list(TOPICS.values()))
    [kind] = random.choices(list(KINDS[topic]), list(KINDS[topic].values()))
    key = f"{number // STEP}-{number % KEYS}" if topic == ALL.steps else ""
    delay = timedelta(seconds=random.randint(1, 8)) if topic == ALL.later else None
    with atomic(), connection.cursor() as cursor:
        receipt = publish_raw(topic, {"do": kind, "number": number}, key=key, delay=delay)
        cursor.execute(NOTE, [number, receipt.message_id, topic, kind, key])
        if number % 5 == 0:
            raise Undone
