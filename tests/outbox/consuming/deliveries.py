"""Messages as a relay sends them, and as a broker hands them out."""

from contextlib import closing

import msgspec
from django.db.models.functions import Now

from outbox.brokers.base import Delivery, Outgoing
from outbox.consuming import deferred
from outbox.consuming.lease_thread import LeaseThread
from outbox.consuming.outcome import Outcome
from outbox.consuming.register import group
from outbox.consuming.run_deferred import run_deferred
from outbox.consuming.subscriptions import subscriptions_of
from outbox.message import Header, Message
from outbox.models import Deferred
from project.shop.models import CartEntry
from tests.factories import message_id

SOURCE = "urn:uuid:of-the-tests"


def headers_of(message: Message, **more: str) -> dict[str, str]:
    meta = message._meta
    own = {Header.TYPE: meta.type, Header.VERSION: str(meta.version), Header.CONTENT_TYPE: "application/json"}
    return own | {name.replace("_", "-"): value for name, value in more.items()}


def numbered(number: int, lane: int = 1, source: str = SOURCE) -> dict[str, str]:
    return {Header.SOURCE: source, Header.LANE: str(lane), Header.NUMBER: str(number)}


def outgoing(message: Message, *, named: str = "", headers: dict[str, str] | None = None, **fields) -> Outgoing:
    """A message as a relay would send it."""
    fields = {"topic": message._meta.topic, "tag": message._meta.tag, "body": msgspec.json.encode(message)} | fields
    return Outgoing(message_id=named or str(message_id()), headers=headers_of(message) | (headers or {}), **fields)


def delivery(message: Message, *, group: str = "cart", named: str = "", headers=None, **fields) -> Delivery:
    """A message as a broker would hand it out."""
    fields = {"topic": message._meta.topic, "tag": message._meta.tag, "body": msgspec.json.encode(message)} | fields
    return Delivery(
        group=group,
        message_id=named or str(message_id()),
        receipt="",
        headers=headers_of(message) | (headers or {}),
        **fields,
    )


def run_due(name: str = "cart") -> list[Outcome]:
    """Run the deferred messages of a group that are due, one after the other; return their outcomes."""
    found = group(name)
    outcomes = []
    with closing(LeaseThread()) as lease_thread:
        while taken := deferred.take(name, subscriptions_of(found), found.using, may_doubt=True):
            outcomes.append(run_deferred(found, taken, lease_thread).outcome)
    return outcomes


def applied() -> list[str]:
    """Return the invoices of the carts that were cleared, in their order."""
    return list(CartEntry.objects.order_by("id").values_list("invoice", flat=True))


def errors(name: str = "cart") -> list[str]:
    """Return the errors of the dead letters of a group, oldest first."""
    return list(
        Deferred.objects.filter(consumer_group=name, dead_at__isnull=False).order_by("id").values_list("error", flat=True)
    )


def end_delays() -> None:
    """End the delays of all deferred messages, as if their time had passed."""
    Deferred.objects.filter(due_at__isnull=False).update(due_at=Now())
