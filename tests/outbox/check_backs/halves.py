"""Half messages as a broker asks about them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from outbox import database, models
from outbox.message import Half, Token


def source_of(using: str = "default") -> str:
    row = database.raw(using).execute("SELECT id FROM outbox_source").fetchone()
    assert row is not None
    return str(row[0])


def half_of(batch: models.Batch, *, position: int = 1, attempt: int | None = None, **fields: Any) -> Half:
    """Make the half message that a batch was decided with at a position, or would have been."""
    half_id = batch.half_ids[position - 1] if batch.half_ids else "never decided"
    token = Token(source_of(batch._state.db or "default"), batch.id, attempt or batch.attempt, position)
    default = {"message_id": str(batch.message_ids[position - 1]), "half_id": half_id, "born_at": datetime.now(UTC)}
    return Half(**{"topic": "orders", "token": str(token), **default, **fields})
