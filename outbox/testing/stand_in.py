"""Replace all brokers of the settings with memory brokers during a test, even if the test changes the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

from django.utils.module_loading import import_string
from msgspec.structs import replace

from outbox import conf
from outbox.brokers.base import Broker
from outbox.brokers.capabilities import HalfMessages
from outbox.brokers.memory import MemoryBroker
from outbox.brokers.memory.store import forget
from outbox.message import TopicType
from outbox.testing.clock import Clock

BACKEND = f"{MemoryBroker.__module__}.{MemoryBroker.__qualname__}"


@contextmanager
def memory_brokers(clock: Clock) -> Iterator[None]:
    """
    Replace each broker with a memory broker inside the block.

    Raises:
        ConfigurationError: the settings are wrong.
    """
    test = f"outbox.testing {uuid4()}"
    stores: set[str] = set()

    def stand_in(settings: conf.Settings) -> conf.Settings:
        names = {alias: f"{test} {alias}" for alias in settings.brokers}
        stores.update(names.values())
        return replace_brokers(settings, names, clock)

    with conf.changed(stand_in):
        try:
            conf.settings()
            yield
        finally:
            for name in stores:
                forget(name)


def replace_brokers(settings: conf.Settings, names: dict[str, str], clock: Clock) -> conf.Settings:
    """
    Return the settings with a memory broker for each broker, without wakeups, and with each topic's number of phases unchanged.

    Args:
        names: alias -> the NAME of its memory broker.
    """
    kinds = {alias: _class_of(broker.backend) for alias, broker in settings.brokers.items()}
    brokers = {alias: conf.BrokerSettings(BACKEND, _options(names[alias], clock, kind)) for alias, kind in kinds.items()}
    topics = {name: replace(topic, type=_type_of(topic, kinds[topic.broker])) for name, topic in settings.topics.items()}
    return replace(settings, brokers=brokers, topics=topics, celery_wakeup=False)


def _class_of(backend: str) -> type[Broker]:
    """Return the class of the broker that is replaced; MemoryBroker if the broker's client is not installed."""
    try:
        broker: type[Broker] = import_string(backend)
    except ImportError:
        return MemoryBroker
    return broker


def _options(name: str, clock: Clock, kind: type[Broker]) -> dict[str, Any]:
    options: dict[str, Any] = {"NAME": name, "CLOCK": clock}
    options |= {"CHECK_AFTER": timedelta(0), "CHECK_INTERVAL": timedelta(0)}  # check-backs are due when the test calls for them
    if issubclass(kind, HalfMessages):
        options["END"] = kind.end_semantics
    return options


def _type_of(topic: conf.TopicSettings, kind: type[Broker]) -> TopicType:
    """Return the type that a topic has with the broker that is replaced: one-phase if that broker has no half messages."""
    if not HalfMessages.has(kind) and topic.type in (None, TopicType.TRANSACTION):
        return TopicType.NORMAL
    return topic.type or TopicType.TRANSACTION
