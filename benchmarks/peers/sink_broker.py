"""The outbox's broker that sends to the sink."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.null_broker import NullBroker
from benchmarks.peers import sink
from outbox.brokers.base import Outgoing, SendResult


class SinkBroker(NullBroker):
    def send(self, messages: Sequence[Outgoing]) -> list[SendResult]:
        results = super().send(messages)
        sink.take(*(message.key for message in messages))
        return results
