"""Message types of these tests."""

from __future__ import annotations

from typing import Any

from outbox import Message


class Placed(Message):
    invoice: str
    items: int = 1

    class Meta:
        topic = "orders"
        key = "invoice"
        tag = "placed"
        type = "tests.Placed"
        version = 2


@Placed.upgrade_from(1)
def name_the_invoice(content: dict[str, Any]) -> dict[str, Any]:
    return {"invoice": content.pop("number"), **content}


class Cancelled(Message):
    invoice: str

    class Meta:
        topic = "orders"
        tag = "cancelled"
        type = "tests.Cancelled"


class Ignored(Message):
    """No test has a handler for it."""

    class Meta:
        topic = "orders"
        type = "tests.Ignored"
