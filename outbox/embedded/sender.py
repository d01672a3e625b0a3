"""Stores messages that are sent, and half messages, with one statement for a batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta

from outbox.brokers.base import ACCEPTED, Outgoing, SendResult, SendStatus
from outbox.database import Connection
from outbox.embedded import halves, log
from outbox.embedded.rows import EmbeddedRow, message_row
from outbox.embedded.topics import Topics


def send(connection: Connection, topics: Topics, messages: Sequence[Outgoing], *, now: datetime | None) -> list[SendResult]:
    """Make messages visible."""
    rows, outcomes = _rows(connection, topics, messages)
    if good := [row for row in rows if row]:
        log.send(connection, good, now=now)
    return [outcome or ACCEPTED for outcome in outcomes]


def send_halves(
    connection: Connection,
    topics: Topics,
    messages: Sequence[Outgoing],
    *,
    check_after: timedelta,
    now: datetime | None,
) -> list[SendResult]:
    """Store half messages."""
    rows, outcomes = _rows(connection, topics, messages)
    good = [row for row in rows if row]
    accepted = [message for row, message in zip(rows, messages, strict=True) if row]
    tokens, given_ids = [message.token for message in accepted], [message.half_id for message in accepted]
    ids = iter(halves.store(connection, good, tokens, given_ids, check_after=check_after, now=now) if good else ())
    return [outcome or SendResult(SendStatus.ACCEPTED, half_id=str(next(ids))) for outcome in outcomes]


def _rows(
    connection: Connection, topics: Topics, messages: Sequence[Outgoing]
) -> tuple[list[EmbeddedRow | None], list[SendResult | None]]:
    """
    Return a row, or None, and a result, or None, for each message.

    There is a result, which is MISCONFIGURED, instead of a row if the stored topic has another type than the one in settings.
    """
    rows: list[EmbeddedRow | None] = []
    outcomes: list[SendResult | None] = []
    keyless_queues: dict[str, int] = {}  # topic -> the queue of all messages of this batch without a key
    for message in messages:
        topic = topics.stored(connection, message.topic)
        difference = topics.difference(topic)
        queue = keyless_queues.get(topic.name)
        if queue is None:
            queue = keyless_queues[topic.name] = random.randrange(topic.queues)  # noqa: S311  (it spreads load)
        rows.append(None if difference else message_row(message, topic, queue))
        outcomes.append(SendResult(SendStatus.MISCONFIGURED, reason=difference) if difference else None)
    return rows, outcomes
