"""The memory broker stands in for every broker of the settings while a test lasts, whatever the test does to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.test import override_settings

from outbox import conf
from outbox.brokers.base import Broker
from outbox.brokers.memory import MemoryBroker
from outbox.brokers.memory.store import forget
from outbox.errors import ConfigurationError
from outbox.message import TopicType
from outbox.testing.clock import Clock

BACKEND = f"{MemoryBroker.__module__}.{MemoryBroker.__qualname__}"


@contextmanager
def memory_brokers(clock: Clock) -> Iterator[str]:
    """Put a memory broker in the place of each broker; give the name under which this test's keep what they hold."""
    name = f"outbox.testing {uuid4()}"
    used: set[str] = set()

    def stand_in(raw: Mapping[str, Any]) -> dict[str, Any]:
        changed = replace_brokers(raw, name, clock)
        used.update(store_name(name, alias) for alias in changed["BROKERS"])
        return changed

    def stand_in_again(*, setting: str, **kwargs: Any) -> None:
        """Follow a test that changes `OUTBOX` itself."""
        raw = getattr(django_settings, "OUTBOX", {})
        if setting == "OUTBOX" and not is_replaced(raw, name):
            django_settings.OUTBOX = stand_in(raw)
            conf.forget()

    with override_settings(OUTBOX=stand_in(getattr(django_settings, "OUTBOX", {}))):
        setting_changed.connect(stand_in_again)
        try:
            yield name
        finally:
            setting_changed.disconnect(stand_in_again)
            for one in used:
                forget(one)


def store_name(name: str, alias: str) -> str:
    """Name what the memory broker of an alias holds."""
    return f"{name} {alias}"


def is_replaced(raw: Mapping[str, Any], name: str) -> bool:
    """Say whether these settings are those of this test already."""
    return all(
        one.get("OPTIONS", {}).get("NAME") == store_name(name, alias) for alias, one in raw.get("BROKERS", {"": {}}).items()
    )


def replace_brokers(raw: Mapping[str, Any], name: str, clock: Clock) -> dict[str, Any]:
    """
    Give the settings with memory brokers in the place of others, no nudges, and topics that travel as they did before.

    Raises:
        ConfigurationError: the settings are wrong.
    """
    settings = conf.read(raw)
    kinds = {alias: _class_of(alias) for alias in settings.brokers}
    brokers = {alias: {"BACKEND": BACKEND, "OPTIONS": _options(store_name(name, alias), clock, kinds[alias])} for alias in kinds}
    topics = {
        topic: {**raw["TOPICS"][topic], "TYPE": _type_of(given, kinds[given.broker])} for topic, given in settings.topics.items()
    }
    return {**raw, "BROKERS": brokers, "TOPICS": topics, "NUDGE": False}


def _class_of(alias: str) -> type[Broker]:
    """Give the broker whose place is taken; one that is not installed here passes for a memory broker."""
    try:
        return conf.broker_class(alias)
    except ConfigurationError:
        return MemoryBroker


def _options(name: str, clock: Clock, kind: type[Broker]) -> dict[str, Any]:
    options: dict[str, Any] = {"NAME": name, "CLOCK": clock}
    options |= {"CHECK_AFTER": timedelta(0), "CHECK_INTERVAL": timedelta(0)}  # asked when the test says so, not by time
    if kind.supports_half_messages:
        options["END"] = kind.end_semantics  # half messages end as they do there
    return options


def _type_of(topic: conf.TopicSettings, kind: type[Broker]) -> TopicType:
    """Give the type by which a topic travels: one-phase where its broker has no half messages."""
    if not kind.supports_half_messages and topic.type in (None, TopicType.TRANSACTION):
        return TopicType.NORMAL
    return topic.type or TopicType.TRANSACTION
