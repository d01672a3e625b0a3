"""The broker of the shop's messages, chosen by the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured


def broker(environ: Mapping[str, str]) -> dict[str, Any]:
    """
    Return the entry of `OUTBOX["BROKERS"]` that BROKER names: embedded, rocketmq, rabbitmq, or kafka.

    Raises:
        ImproperlyConfigured: BROKER has another value.
    """
    name = environ.get("BROKER", "embedded")
    if name == "embedded":
        return {"BACKEND": "outbox.embedded.EmbeddedBroker", "OPTIONS": {"DATABASE": "default"}}
    if name == "rocketmq":
        options: dict[str, Any] = {
            "ENDPOINTS": environ.get("ROCKETMQ_ENDPOINTS", "127.0.0.1:8081"),
            "NAME_SERVERS": environ.get("ROCKETMQ_NAME_SERVERS", "127.0.0.1:9876").split(","),
        }
        return {"BACKEND": "outbox.brokers.rocketmq.RocketMQBroker", "OPTIONS": options}
    if name == "rabbitmq":
        options = {
            "NODES": environ.get("RABBITMQ_NODES", "127.0.0.1:5672").split(","),
            "USER": environ.get("RABBITMQ_USER", "guest"),
            "PASSWORD": environ.get("RABBITMQ_PASSWORD", "guest"),
        }
        return {"BACKEND": "outbox.brokers.rabbitmq.RabbitMQBroker", "OPTIONS": options}
    if name == "kafka":
        options = {"SERVERS": environ.get("KAFKA_SERVERS", "127.0.0.1:9092").split(",")}
        return {"BACKEND": "outbox.brokers.kafka.KafkaBroker", "OPTIONS": options}
    known = '"embedded", "rocketmq", "rabbitmq" or "kafka"'
    raise ImproperlyConfigured(f"The environment variable BROKER is {name!r}. Set it to {known}.")
