"""
What keeps a day of messages in the database: whatever still points into it. Prune and the archive ask alike.

An app that must have seen a day before it is dropped registers a `RetentionHold` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

# What still points into a day. A dead batch does until each of its messages has a copy.
HOLDS_DAY = """
SELECT CASE
    WHEN EXISTS (SELECT FROM outbox_ticket WHERE message_id >= %(first)s AND message_id < %(end)s) THEN 'waiting messages'
    WHEN EXISTS (SELECT FROM outbox_delayed WHERE message_id >= %(first)s AND message_id < %(end)s) THEN 'delayed messages'
    WHEN EXISTS (
        SELECT FROM outbox_batch, unnest(message_ids) m(id)
        WHERE state IN (0, 1, 2) AND m.id >= %(first)s AND m.id < %(end)s) THEN 'unfinished batches'
    WHEN EXISTS (
        SELECT FROM outbox_batch, unnest(message_ids) WITH ORDINALITY u(id, n)
        WHERE state = 4 AND u.id >= %(first)s AND u.id < %(end)s AND n <> ALL(split)
        AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.message_id = u.id AND d.body IS NOT NULL)
        AND EXISTS (SELECT FROM outbox_message m WHERE m.id = u.id)) THEN 'dead messages without a copy'
END
"""


@dataclass(frozen=True, slots=True)
class RetentionHold:
    """
    What an app keeps from being pruned, because it takes it away itself.

    Args:
        reason: what an operator reads beside a day that is kept.
        retention: returns how long messages stay for the app's sake; None while the app holds nothing.
        grace: a day held longer than this beyond its time raises an alert.
        tables: their rows are deleted by the app, not by the prune.
    """

    reason: str
    retention: Callable[[], timedelta | None]
    grace: timedelta
    tables: frozenset[str] = frozenset()


_holds: list[RetentionHold] = []


def register(hold: RetentionHold) -> None:
    """Add a hold that every prune of this process respects."""
    if hold not in _holds:
        _holds.append(hold)


def active() -> dict[RetentionHold, timedelta]:
    """Return the holds that hold something now, each with how long messages stay for it."""
    return {hold: retention for hold in _holds if (retention := hold.retention()) is not None}


def find_holder(connection: psycopg.Connection[Any], first: object, end: object) -> str | None:
    """Return what still points at messages whose ids are from `first` up to, not including, `end`; None: nothing does."""
    row = connection.execute(HOLDS_DAY, {"first": first, "end": end}).fetchone()
    assert row is not None
    holder: str | None = row[0]
    return holder
