"""Helpers that open breakers, as an outage does."""

from outbox.relay.breaker import Breakers, BreakerState


def open_for(breakers: Breakers, *topics: str) -> None:
    """Note topics as unavailable until their breakers open; three open topics open the broker's breaker."""
    for topic in topics:
        while not breakers.record_no_answer(topic):
            pass


def open_broker(breakers: Breakers) -> None:
    """Open the breaker of the broker."""
    open_for(breakers, "away-1", "away-2", "away-3")
    assert breakers.state is BreakerState.OPEN
