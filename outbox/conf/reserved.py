"""Topics that exist with a broker, without an entry in `OUTBOX["TOPICS"]`: `Broker.reserved_topics`."""

from __future__ import annotations

from django.utils.module_loading import import_string
from msgspec.structs import replace

from outbox.conf.sections import BrokerSettings, Settings, TopicSettings
from outbox.errors import ConfigurationError


def add_reserved_topics(settings: Settings) -> Settings:
    """
    Return the settings with the topics that their brokers reserve.

    Raises:
        ConfigurationError: another broker has a topic of that name.
    """
    # A broker that carries topics of TOPICS is not imported for this: settings are read before Django's apps are ready.
    used = {topic.broker for topic in settings.topics.values()}
    added: dict[str, TopicSettings] = {}
    for alias, broker in settings.brokers.items():
        for name in () if alias in used else _reserved_by(broker):
            other = added.get(name) or settings.topics.get(name)
            if other is not None:
                raise ConfigurationError(
                    f"Topic {name!r} is reserved for the broker {alias!r}, and OUTBOX gives it to {other.broker!r}.",
                    hint="Keep one of the two brokers, or call the other topic by another name.",
                )
            added[name] = TopicSettings(broker=alias)
    return replace(settings, topics=settings.topics | added) if added else settings


def _reserved_by(broker: BrokerSettings) -> tuple[str, ...]:
    try:
        names: tuple[str, ...] = getattr(import_string(broker.backend), "reserved_topics", ())
    except ImportError:  # E003 says it
        return ()
    return names
