"""
The parts of an AsyncAPI document that describe RabbitMQ.

Source: AsyncAPI's AMQP bindings 0.3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import quote

from outbox.brokers.asyncapi import TEXT, BrokerInterface
from outbox.brokers.base import TopicSpec
from outbox.brokers.options import read_options
from outbox.brokers.rabbitmq.envelope import KEY, PERSISTENT, STORED_AT, TAG
from outbox.brokers.rabbitmq.options import RabbitMQOptions, addresses

EXCHANGE = "It is the topic exchange {topic!r}, and the routing key is the tag. Bind a queue of your own to it, by a tag or by #."
TAGS = "The message's tag; empty without one. A queue that is bound to # gets all messages."


class RabbitMQInterface(BrokerInterface, frozen=True):
    """How other programs read RabbitMQ's messages."""

    virtual_host: str = "/"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        settings = read_options(RabbitMQOptions, options)
        pathname = f"/{quote(settings.virtual_host, safe='')}"
        return cls("amqps" if settings.tls else "amqp", addresses(settings), pathname, virtual_host=settings.virtual_host)

    def how_to_read(self, topic: TopicSpec) -> str:
        """Return a sentence about the exchange that queues are bound to."""
        return EXCHANGE.format(topic=topic.name)

    def more_headers(self) -> Mapping[str, Any]:
        """Return the headers for values that AMQP has no property for."""
        return {
            KEY: TEXT | {"description": "The key; empty without one."},
            TAG: TEXT | {"description": "The tag; empty without one."},
            STORED_AT: {"type": "integer", "description": "When it was sent: microseconds since 1970."},
        }

    def channel(self, topic: TopicSpec) -> dict[str, Any]:
        """Return the description of the exchange. In AsyncAPI, the address of an AMQP channel is the routing key."""
        exchange = {"name": topic.name, "type": "topic", "durable": True, "autoDelete": False, "vhost": self.virtual_host}
        return {
            "address": "{tag}",
            "parameters": {"tag": {"description": TAGS}},
            "bindings": _bindings({"is": "routingKey", "exchange": exchange}),
        }

    def send(self) -> dict[str, Any]:
        """Return the binding for sends: messages are persistent, and are returned if no queue takes them."""
        return _bindings({"deliveryMode": PERSISTENT, "mandatory": True})

    def receive(self, group: str) -> dict[str, Any]:
        """Return the binding for receives: deliveries are acknowledged."""
        return _bindings({"ack": True})


def _bindings(of_amqp: dict[str, Any]) -> dict[str, Any]:
    return {"amqp": of_amqp | {"bindingVersion": "0.3.0"}}
