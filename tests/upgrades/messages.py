"""What the shop publishes. `what` is different for each message; `do` says how its handler misbehaves where a dump is made."""

from __future__ import annotations

from outbox import Message


class Order(Message):
    what: str
    do: str = ""

    class Meta:
        topic = "orders"
