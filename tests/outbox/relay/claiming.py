"""Claims of one relay, as the tests of claims make them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from outbox import database
from outbox.relay import lane as lanes
from outbox.relay.claims import Claims

LEASE = timedelta(seconds=30)


def claims(connection: database.Connection | None = None, lane: int = 1, **options: Any) -> Claims:
    """Make the claims of a relay to the broker "default"."""
    return Claims(
        connection or database.raw("default"), "default", lanes.Lane(lane), LEASE, options.pop("batch_size", 500), **options
    )
