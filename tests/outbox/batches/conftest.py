"""Batches are made and moved on by the same fixtures as in the tests of the relay."""

from tests.outbox.relay.conftest import broker, clock, connect, make_broker, make_relay, make_topic, relay, splitter

__all__ = ["broker", "clock", "connect", "make_broker", "make_relay", "make_topic", "relay", "splitter"]
