"""The context that a handler receives with a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Context:
    """
    The context that a handler receives with a message.

    Args:
        delivery_count: how often the broker has delivered the message to the group, this time included. Deployments and
            outages cause deliveries too.
        failures: how often the handler has failed with the message before.
        idempotency_key: the same for each delivery of the message to the group. Pass it to services outside the database, so
            that they act once.
        source, lane, number: the position of the message among those of one relay, gap-free per source, topic and lane; lane and
            number are None for messages of other producers.
        stored_at: when the broker made the message visible; None where the broker does not say.
    """

    message_id: str
    group: str
    topic: str
    key: str
    tag: str
    headers: Mapping[str, str]
    delivery_count: int
    idempotency_key: str
    source: str
    lane: int | None
    number: int | None
    stored_at: datetime | None
    failures: int = 0
