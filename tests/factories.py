"""The public factories, and a second look at what they made."""

from typing import Any

from outbox import models
from outbox.testing.factories import (
    BatchFactory,
    DelayedFactory,
    MessageRowFactory,
    TicketFactory,
    TopicFactory,
    message_id,
)

__all__ = [
    "BatchFactory",
    "DelayedFactory",
    "MessageRowFactory",
    "TicketFactory",
    "TopicFactory",
    "message_id",
    "stored",
]


def stored(row: Any) -> Any:
    """Read a row (or a batch in the relay's memory) again, as the database holds it now."""
    model = type(row) if hasattr(row, "_meta") else models.Batch
    return model.objects.get(pk=getattr(row, "pk", None) or row.id)
