"""What the benchmarks publish."""

from __future__ import annotations

from outbox import Message


class BenchOrder(Message):
    order_id: int
    customer: str
    total: str

    class Meta:
        topic = "bench-two-phase"
        key = "order_id"


class Clocked(Message):
    number: int

    class Meta:
        topic = "bench-clocked"
        key = "number"


class ClockedOnePhase(Message):
    number: int

    class Meta:
        topic = "bench-clocked-one-phase"
        key = "number"


class ClockedAtBroker(Message):
    number: int

    class Meta:
        topic = "bench-clocked-at-broker"
        key = "number"


class ClockedOnRocketMQ(Message):
    number: int

    class Meta:
        topic = "bench-rocketmq"
        key = "number"


class ClockedOnKafka(Message):
    number: int

    class Meta:
        topic = "bench-kafka"
        key = "number"


class ClockedOnRabbitMQ(Message):
    number: int

    class Meta:
        topic = "bench-rabbitmq"
        key = "number"
