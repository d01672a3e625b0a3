"""Messages of the shop whose processes are frozen, and their consumer, which writes their numbers down."""

from __future__ import annotations

from django.db import connection

from outbox import Message, consumer
from tests.journeys.frozen.settings import GROUP


class Pair(Message):
    number: int

    class Meta:
        topic = "pairs"


class Parcel(Message):
    parcel: str
    number: int

    class Meta:
        topic = "parcels"
        key = "parcel"


def note(number: int) -> None:
    """Write a number down."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO journey_frozen (number) VALUES (%s)", [number])


@consumer(Pair, group=GROUP)
def handle_pair(message: Pair, context: object) -> None:
    note(message.number)


@consumer(Parcel, group=GROUP)
def handle_parcel(message: Parcel, context: object) -> None:
    note(message.number)
