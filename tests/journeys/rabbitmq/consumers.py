"""
Handlers that do what their message says, and write down what they did; nothing keeps them from writing it twice but the inbox.

Each run is written down over a connection of its own, so that it stays when the handler fails.
"""

import random
import threading
import time
from datetime import timedelta
from typing import Any

from django.db import connection

from outbox import Context, Reject, RetryLater, RetryPolicy, consumer, database
from tests.journeys.rabbitmq.given import DELAY, LIMIT, given, names

ALL = names(given.get("unique", "nowhere"))

NOTE = "INSERT INTO storm_effect (consumer_group, topic, key, number) VALUES (%s, %s, %s, %s)"
NOTE_FAILED = "INSERT INTO storm_failed (consumer_group, number) VALUES (%s, %s)"

RETRY = RetryPolicy(limit=LIMIT, delays=[DELAY], jitter=0)
PATIENT = RetryPolicy(limit=1000, delays=[timedelta(seconds=0.5)], jitter=0)
NOW_AND_THEN = 0.03


def work(message: dict[str, Any], context: Context) -> None:
    note(message, context)
    match message["do"]:
        case "flaky" if context.failures < 2:
            fail(message, context, "not yet")
        case "bad":
            fail(message, context, "bad")
        case "rejected":
            raise Reject("of no use")
        case "put off" if context.delivery_count < 3:
            raise RetryLater(1)
        case "loop":
            while True:
                time.sleep(0.05)
        case "stuck":  # nothing can interrupt it
            threading.Event().wait(10)


def with_luck(message: dict[str, Any], context: Context) -> None:
    note(message, context)
    if message["do"] == "rejected":
        raise Reject("of no use")
    if random.random() < NOW_AND_THEN:
        raise ValueError("no luck")


def together(messages: list[dict[str, Any]], contexts: list[Context]) -> None:
    for message, context in zip(messages, contexts, strict=True):
        note(message, context)
        if message["do"] == "bad":
            if len(messages) == 1:
                fail(message, context, "bad")
            raise ValueError("one of them is bad")
    if random.random() < NOW_AND_THEN:
        raise ValueError("no luck")


def note(message: dict[str, Any], context: Context) -> None:
    with connection.cursor() as cursor:
        cursor.execute(NOTE, [context.group, context.topic, context.key, message["number"]])


def fail(message: dict[str, Any], context: Context, text: str) -> None:
    with database.connect("default", application_name="storm") as apart:
        apart.execute(NOTE_FAILED, [context.group, message["number"]])
    raise ValueError(text)


consumer(topic=ALL.work, group=ALL.one, retry=RETRY, time_limit=timedelta(seconds=3))(work)
consumer(topic=ALL.later, group=ALL.one, retry=PATIENT)(with_luck)
consumer(topic=ALL.steps, group=ALL.one, retry=PATIENT)(with_luck)
consumer(topic=ALL.bulk, group=ALL.two, retry=RETRY, batch_size=20)(together)
consumer(topic=ALL.spare, group=ALL.third, retry=PATIENT)(with_luck)


@consumer(topic=ALL.work, group=ALL.two, retry=PATIENT)
def other(message: dict[str, Any], context: Context) -> None:
    with_luck({**message, "do": "fine"}, context)
