"""The page about messages for other programs, and the type of a message that tests compare with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from django.conf import settings

from outbox import Message

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
