"""Breakers as an outage leaves them."""

from __future__ import annotations

from outbox.relay.breaker import Breakers, BreakerState


def open_for(breakers: Breakers, *topics: str) -> None:
    """Leave topics without an answer till their breakers open; those of three topics open the broker's."""
    for topic in topics:
        while not breakers.note_unavailable(topic):
            pass


def open_broker(breakers: Breakers) -> None:
    """Make the broker unreachable."""
    open_for(breakers, "away-1", "away-2", "away-3")
    assert breakers.state is BreakerState.OPEN
