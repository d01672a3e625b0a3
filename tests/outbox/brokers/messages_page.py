"""The page and the document about messages for other programs, and the type of a message that tests compare with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
from django.conf import settings

from outbox import Message
from outbox.catalogue.asyncapi import document
from outbox.catalogue.entries import read_entries

PAGE = Path(settings.BASE_DIR) / "docs/brokers/messages.md"


def names(heading: str) -> set[str]:
    """Return the names in the first column of the table below a heading of the page."""
    section = re.split(r"^#+ ", PAGE.read_text(), flags=re.MULTILINE)
    (table,) = [part for part in section if part.startswith(f"{heading}\n")]
    return set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE))


def type_of(name: str) -> type[Any]:
    """Return a message type of a topic."""

    class OrderPlaced(Message):
        order_id: int

        class Meta:
            topic = name
            type = "shop.OrderPlaced"
            key = "order_id"
            tag = "placed"

    return OrderPlaced


def require_described(name: str, headers: Mapping[str, object], body: bytes) -> None:
    """Raise unless the AsyncAPI document has a message of that name with these headers and this body."""
    found = document(read_entries())
    (message,) = [one for one in found["components"]["messages"].values() if one.get("name") == name]
    assert set(headers) <= set(message["headers"]["properties"])
    jsonschema.Draft7Validator(message["headers"]).validate(headers)
    jsonschema.Draft7Validator({**found, **message["payload"]}).validate(json.loads(body))


def require_all(seen: Sequence[tuple[Any, Any]]) -> None:
    """Raise unless a handler of the type has seen one message of another program, which had all that ours have."""
    [(message, context)] = seen
    assert (type(message).__name__, message.order_id) == ("OrderPlaced", 4711)
    assert (context.message_id, context.source) == ("a-1", "https://shipping.example")
    assert (context.key, context.tag, context.headers["x-tenant"]) == ("4711", "shipped", "eu")
