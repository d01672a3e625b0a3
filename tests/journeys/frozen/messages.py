"""Messages of the shop whose processes are frozen, and their consumer, which writes their numbers down."""

from __future__ import annotations

from django.db import connection

from outbox import Message, consumer
from tests.journeys.frozen.settings import GROUP


class FrozenPair(Message):
    number: int

    class Meta:
        topic = "pairs"


class FrozenParcel(Message):
    parcel: str
    number: int

    class Meta:
        topic = "parcels"
        key = "parcel"


def note(number: int) -> None:
    """Write a number down."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO journey_frozen (number) VALUES (%s)", [number])


def register() -> None:
    """Register the consumer: in a process that is frozen, and in a test that has consumers of its own."""

    @consumer(FrozenPair, group=GROUP)
    def handle_pair(message: FrozenPair, context: object) -> None:
        note(message.number)

    @consumer(FrozenParcel, group=GROUP)
    def handle_parcel(message: FrozenParcel, context: object) -> None:
        note(message.number)
