"""RabbitMQ: topic exchanges, a quorum queue for each consumer group, publisher confirms. See docs/brokers/rabbitmq.md."""

from outbox.brokers.rabbitmq.broker import RabbitMQBroker

__all__ = ["RabbitMQBroker"]
