"""The types and handlers of one release; nothing keeps the handlers from writing twice what they handled but the inbox."""

from __future__ import annotations

from django.db import connection

from outbox import Context, Message, consumer
from tests.journeys.deploys.given import given

NOTE = "INSERT INTO deploy_effect (release, consumer_group, topic, key, number) VALUES (%s, %s, %s, %s, %s)"

TOPICS: dict[str, str] = given.get("types", {})


class Placed(Message):
    number: int

    class Meta:
        topic = TOPICS.get("Placed", "nowhere")
        type = "Placed"


class Cancelled(Message):
    number: int

    class Meta:
        topic = TOPICS.get("Cancelled", "nowhere")
        type = "Cancelled"


def note(message: Placed | Cancelled, context: Context) -> None:
    with connection.cursor() as cursor:
        cursor.execute(NOTE, [given["name"], context.group, context.topic, context.key, message.number])


TYPES: dict[str, type[Message]] = {"Placed": Placed, "Cancelled": Cancelled}

for name, group, tags in given.get("handlers", []):
    consumer(TYPES[name], group=group, tags=tags or None)(note)
