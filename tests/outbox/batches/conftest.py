"""The fixtures of the relay's tests, for batches, too."""

from tests.outbox.relay.conftest import (
    broker,
    clock,
    committer,
    connect,
    make_broker,
    make_committer,
    make_relay,
    make_topic,
    relay,
    splitter,
)

__all__ = [
    "broker",
    "clock",
    "committer",
    "connect",
    "make_broker",
    "make_committer",
    "make_relay",
    "make_topic",
    "relay",
    "splitter",
]
