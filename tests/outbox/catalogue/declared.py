"""Message types, consumers and settings of which a catalogue has something of everything."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

import msgspec

from outbox import Message, consumer

SECRET = "b3c1f7"  # begins each of them

EMBEDDED = {"BACKEND": "outbox.embedded.EmbeddedBroker"}
RABBITMQ = {
    "BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker",
    "OPTIONS": {
        "NODES": ["rabbit-1", "rabbit-2:5673"],
        "USER": f"{SECRET}-user",
        "PASSWORD": f"{SECRET}-password",
        "VIRTUAL_HOST": "/shop",
    },
}
CELERY = {"BACKEND": "outbox.celery.CeleryBroker", "OPTIONS": {"APP": "project.celery.app"}}
KAFKA = {
    "BACKEND": "outbox.brokers.kafka.KafkaBroker",
    "OPTIONS": {
        "SERVERS": ["kafka-1:9092", "kafka-2:9092"],
        "CLIENT": {"security.protocol": "SASL_SSL", "sasl.username": f"{SECRET}-user", "sasl.password": f"{SECRET}-password"},
    },
}
ROCKETMQ = {
    "BACKEND": "outbox.brokers.rocketmq.RocketMQBroker",
    "OPTIONS": {
        "ENDPOINTS": "proxy-1:8081;proxy-2:8081",
        "NAME_SERVERS": ["names-1:9876"],
        "ACCESS_KEY": f"{SECRET}-key",
        "SECRET_KEY": f"{SECRET}-secret",
    },
}

# The topics of each broker, of each type that it has.
TOPICS: dict[str, dict[str, Any]] = {
    "orders": {"TYPE": "fifo"},
    "reminders": {"TYPE": "delay"},
    "imports": {},
    "partners / 1": {"TYPE": "normal"},
}


def outbox_settings(broker: dict[str, Any]) -> dict[str, Any]:
    """Return OUTBOX with everything on one broker."""
    return {"PROJECT": "shop", "BROKERS": {"default": broker}, "TOPICS": TOPICS}


class Size(Enum):
    SMALL = "S"
    LARGE = "L"


class Category(msgspec.Struct):
    name: str
    parent: Category | None = None


@dataclass
class Article:
    number: str
    category: Category


class Cash(msgspec.Struct, tag=True):
    currency: str


class Card(msgspec.Struct, tag=True):
    network: str


def declare() -> None:
    """Declare types and consumers. The test's settings and registers have to be empty of others."""

    class Placed(Message):
        """
        An order was
        placed.

        Once for each order.
        """

        invoice: str
        sizes: tuple[int, Size]
        article: Article
        paid_by: Cash | Card
        placed_at: datetime

        class Meta:
            topic = "orders"
            key = "invoice"
            version = 3
            type = "shop/Order Placed"

    class Cancelled(Message):
        invoice: str
        category: Category | None = None

        class Meta:
            topic = "orders"
            tag = "cancelled"

    class Due(Message):
        invoice: str
        after: timedelta = timedelta(days=1)

        class Meta:
            topic = "reminders"

    class Lost(Message):
        invoice: str

        class Meta:
            topic = "unknown"

    @consumer(Placed, Cancelled, group="cart")
    def clear(message: object, context: object) -> None: ...

    @consumer(topic="orders", group="cart")
    def clear_rest(message: object, context: object) -> None: ...

    @consumer(topic="orders", group="copies", tags=["cancelled", "late"])
    def copy(message: object, context: object) -> None: ...

    @consumer(topic="imports", group="copies")
    def read(message: object, context: object) -> None: ...

    @consumer(Lost, group="lost")
    def find(message: object, context: object) -> None: ...
