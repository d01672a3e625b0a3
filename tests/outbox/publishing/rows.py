"""Messages that these tests publish, and a look at what was written."""

import json

from outbox import Message
from outbox.models import Delayed, MessageRow, Ticket


class OrderMade(Message):
    order_id: int
    customer: str = "Ann"

    class Meta:
        topic = "made"
        key = "order_id"
        tag = "new"
        version = 3


class ParcelMoved(Message):
    parcel: str | None
    place: int = 0

    class Meta:
        topic = "moved"
        key = "parcel"


class ReminderSet(Message):
    text: str

    class Meta:
        topic = "due"


def message_rows(using="default"):
    return list(MessageRow.objects.using(using).order_by("id"))


def bodies(using="default"):
    return [json.loads(bytes(row.body)) for row in message_rows(using)]


def headers_of(receipt):
    return json.loads(MessageRow.objects.get(id=receipt.message_id).headers)


def tickets(using="default"):
    return list(Ticket.objects.using(using).order_by("pos"))


def waiting_ids(using="default"):
    return [ticket.message_id for ticket in tickets(using)]


def delayed_rows():
    return list(Delayed.objects.all())
