"""Half messages as a broker asks about them."""

from datetime import UTC, datetime, timedelta
from typing import Any

from outbox import database, models
from outbox.check_backs.resolve import resolve
from outbox.message import Half, Resolution, Token
from tests.factories import message_id


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


def half_first(batch: models.Batch | None = None, **fields: Any) -> Half:
    """Make the half message that the transaction of a batch sent, or that of one which wrote nothing."""
    default = {
        "message_id": str(batch.message_ids[0] if batch else message_id()),
        "half_id": batch.half_ids[0] if batch else "h",
        "token": str(Token(source_of(), 0, 1, 1)),
    }
    return Half(**{"topic": "orders", "born_at": datetime.now(UTC), **default, **fields})


def ask(connection: database.Connection, half: Half) -> tuple[Resolution, bool]:
    """Return (resolution, whether an alert was sent)."""
    answer = resolve(connection, half)
    return answer.resolution, answer.is_alert


def soon() -> datetime:
    return datetime.now(UTC) + timedelta(seconds=30)
