"""The messages of a soak, and handlers that write down what they did; nothing keeps them from writing it twice but the inbox."""

from __future__ import annotations

from datetime import timedelta

from django.db import connection

from outbox import Context, Message, Reject, RetryPolicy, consumer
from tests.journeys.soak.given import given, names

ALL = names(given.get("unique", "nowhere"))

NOTE = "INSERT INTO soak_effect (number, topic, key) VALUES (%s, %s, %s)"
IS_REPLAYED = "SELECT EXISTS (SELECT FROM soak_replayed WHERE message_id = %s)"

RETRY = RetryPolicy(limit=2, delays=[timedelta(seconds=1)])


class Work(Message):
    """What a message says: its number, and what its handler does."""

    number: int
    do: str
    key: str

    class Meta:
        topic = ALL.work
        key = "key"


class OtherWork(Work):
    class Meta:
        topic = ALL.work
        key = "key"


class Step(Work):
    class Meta:
        topic = ALL.steps
        key = "key"


class Later(Work):
    class Meta:
        topic = ALL.later


def work(message: Work, context: Context) -> None:
    with connection.cursor() as cursor:
        cursor.execute(NOTE, [message.number, context.topic, message.key])
        if message.do == "mended":
            cursor.execute(IS_REPLAYED, [context.message_id])
            if not cursor.fetchone()[0]:
                raise Reject("mended later")
    if message.do == "flaky" and not context.failures:
        raise ValueError("not yet")
    if message.do == "bad":
        raise ValueError("bad")


for type_ in (Work, Later) if given.get("release") == "old" else (Work, OtherWork, Later):
    consumer(type_, group=ALL.group, retry=RETRY)(work)
consumer(Step, group=ALL.group, retry=RETRY)(work)
