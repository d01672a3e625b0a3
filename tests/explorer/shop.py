"""What the framework is used for in a schedule: orders, and a group of consumers that notes the effect of each."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import connections

import outbox
from outbox import Message, RetryPolicy, consumer

GROUP = "effects"
TABLES = """
CREATE SEQUENCE explorer_place;
CREATE TABLE explorer_order (number int PRIMARY KEY, topic text, key text, place bigint);
CREATE TABLE explorer_effect (id bigserial, number int);
"""


class OrderPlaced(Message):
    """The message of an order that goes half first."""

    order: int

    class Meta:
        topic = "half"


def place_order(number: int, topic: str, key: str, *, half_first: bool, is_rolled_back: bool) -> None:
    """
    Insert an order and publish its message in one transaction.

    The place of an order is drawn while the key is locked, so that places are in the order of commits.
    """
    message = OrderPlaced(order=number) if half_first else None
    with outbox.atomic("default", half_first=message):
        if message is None:
            outbox.publish_raw(topic, {"order": number}, key=key)
        with connections["default"].cursor() as cursor:
            cursor.execute("INSERT INTO explorer_order VALUES (%s, %s, %s, nextval('explorer_place'))", [number, topic, key])
        if is_rolled_back:
            raise Refused


class Refused(Exception):
    """The business refuses an order, so its transaction is rolled back."""


def note_effect(message: dict[str, Any], context: outbox.Context) -> None:
    """
    Note the effect of an order, of every third one at the second try.

    Nothing but the inbox keeps it from being noted twice.
    """
    with connections["default"].cursor() as cursor:
        cursor.execute("INSERT INTO explorer_effect (number) VALUES (%s)", [message["order"]])
    if message["order"] % 3 == 0 and not context.failures:
        raise NotYet


class NotYet(Exception):
    """The business cannot handle an order yet."""


for topic in ("plain", "keyed", "half"):
    consumer(group=GROUP, topic=topic, retry=RetryPolicy(delays=[timedelta(seconds=5)]))(note_effect)
