"""
Handlers that do what their message says, and write down what they did; nothing keeps them from writing it twice but the inbox.

The second release handles a type more, and leaves one out that the first one handles.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta

from django.db import connection

from outbox import Context, Message, Reject, RetryLater, RetryPolicy, consumer
from tests.journeys.consumers.given import INVISIBLE, given, names

WORK, STEPS, GROUP = names(given)
NOTE = "INSERT INTO storm_effect (message_id, topic, key, number, began_at) VALUES (%s, %s, %s, %s, clock_timestamp())"
RETRY = RetryPolicy(limit=2, delays=[timedelta(seconds=0.3)], jitter=0)


class Told(Message):
    """What every release handles."""

    do: str
    number: int

    class Meta:
        topic = WORK


class Older(Told):
    class Meta:
        topic = WORK


class Newer(Told):
    class Meta:
        topic = WORK


class Step(Told):
    class Meta:
        topic = STEPS


def work(message: Told, context: Context) -> None:
    with connection.cursor() as cursor:
        cursor.execute(NOTE, [context.message_id, context.topic, context.key, message.number])
    match message.do:
        case "flaky" if context.failures < 2:
            raise ValueError("not yet")
        case "bad":
            raise ValueError("bad")
        case "rejected":
            raise Reject("of no use")
        case "later" if context.delivery_count < 4:
            raise RetryLater(0.3)
        case "slow":
            threading.Event().wait(INVISIBLE.total_seconds() + 3)
        case "slow and bad":
            threading.Event().wait(INVISIBLE.total_seconds() + 1)
            raise ValueError("slow and bad")
        case "exit":
            sys.exit(7)
        case "loop":
            while True:
                pass
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


for type_ in (Told, Older if given.get("release") == 1 else Newer):
    consumer(type_, group=GROUP, retry=RETRY, time_limit=4 * INVISIBLE)(work)
consumer(Step, group=GROUP, retry=RetryPolicy(limit=1000, delays=[timedelta(seconds=0.2)]))(work)
