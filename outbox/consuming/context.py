"""What a handler is told beside the message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Context:
    """
    What a handler is told beside the message.

    Args:
        attempt: which delivery to the group this is, from 1. Deployments and outages make deliveries, too.
        failures: how often the handler has failed with the message before.
        idempotency_key: the same at each delivery of the message to the group: hand it to services outside the
            database, so that they act once.
        source, lane, number: the message's place among those of one relay, gap-free per source, topic and lane; the
            numbers are None where it carries none.
        stored_at: when the broker made the message visible, where it says so.
    """

    message_id: str
    group: str
    topic: str
    key: str
    tag: str
    headers: Mapping[str, str]
    attempt: int
    idempotency_key: str
    source: str
    lane: int | None
    number: int | None
    stored_at: datetime | None
    failures: int = 0
