"""
The parts of an AsyncAPI document that describe Kafka.

Source: AsyncAPI's Kafka bindings 0.5.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from outbox.brokers.asyncapi import TEXT, BrokerInterface
from outbox.brokers.base import TopicSpec
from outbox.brokers.kafka.client import milliseconds
from outbox.brokers.kafka.codec import record_header
from outbox.brokers.kafka.options import KafkaOptions
from outbox.brokers.options import read_options

COMMITTED = "Read it with isolation.level=read_committed: records of transactions that are not committed are not published."


class KafkaInterface(BrokerInterface, frozen=True):
    """How other programs read Kafka's records."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        settings = read_options(KafkaOptions, options)
        is_tls = "ssl" in str(settings.client.get("security.protocol", "")).lower()
        protocol = "kafka-secure" if is_tls else "kafka"
        return cls(protocol, settings.servers, reading=COMMITTED if settings.transactions else "")

    def header_name(self, name: str) -> str:
        """Return the name of a record's header."""
        return record_header(name)

    def channel(self, topic: TopicSpec) -> dict[str, Any]:
        """Return the description of a topic, as `outbox_topics` creates it."""
        retention = {"retention.ms": milliseconds(topic.retention)}
        binding = {"topic": topic.name, "partitions": topic.queues, "topicConfiguration": retention}
        return {"address": topic.name, "bindings": _bindings(binding)}

    def message(self, key: str) -> dict[str, Any]:
        """Return the description of a record's key."""
        return _bindings({"key": TEXT | {"description": f"The field {key}, as text."}}) if key else {}

    def receive(self, group: str) -> dict[str, Any]:
        """Return the description of a consumer group's id."""
        return _bindings({"groupId": TEXT | {"const": group}})


def _bindings(of_kafka: dict[str, Any]) -> dict[str, Any]:
    return {"kafka": of_kafka | {"bindingVersion": "0.5.0"}}
