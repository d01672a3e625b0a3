"""Apache Kafka: each message is published exactly once, in transactions of a relay's lane. See docs/brokers/kafka.md."""

from outbox.brokers.kafka.broker import KafkaBroker

__all__ = ["KafkaBroker"]
