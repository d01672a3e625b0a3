"""Handlers that write down what they did; nothing keeps them from writing it twice but the inbox."""

from datetime import timedelta
from typing import Any

from django.db import connection

from outbox import Message, RetryPolicy, consumer
from tests.journeys.rocketmq.names import given, names

WORK, STEPS, GROUP = names(given.get("unique", "nowhere"))

NOTE = "INSERT INTO journey_effect (topic, key, number) VALUES (%s, %s, %s)"
IS_STUCK = "SELECT EXISTS (SELECT FROM journey_stuck WHERE key = %s)"


class Numbered(Message):
    """What goes half first."""

    number: int

    class Meta:
        topic = WORK


@consumer(topic=WORK, group=GROUP)
def work(message: dict[str, Any], context: Any) -> None:
    note(message, context)


def step(message: dict[str, Any], context: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(IS_STUCK, [context.key])
        (is_stuck,) = cursor.fetchone()
    if is_stuck:
        raise ValueError(f"{context.key} is stuck")
    note(message, context)


def note(message: dict[str, Any], context: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(NOTE, [context.topic, context.key, message["number"]])


if given.get("ordered", True):
    consumer(topic=STEPS, group=GROUP, retry=RetryPolicy(limit=1000, delays=[timedelta(milliseconds=200)]))(step)
