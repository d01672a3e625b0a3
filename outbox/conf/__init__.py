"""
`OUTBOX` of Django's settings as one typed, frozen object.

`settings()` reads it at the first use, and again after the signal `setting_changed`, so that `override_settings` works.
`conf.sections` has every setting with its type, default and unit.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string
from msgspec.structs import replace

from outbox.conf.reading import read
from outbox.conf.sections import BrokerSettings, RelaySettings, Settings, TopicSettings
from outbox.errors import ConfigurationError, UnknownTopic
from outbox.message import TopicSpec, TopicType

if TYPE_CHECKING:  # at run time, settings are read without importing a broker
    from outbox.brokers.base import Broker

__all__ = [
    "RETRY_DELAYS",
    "BrokerSettings",
    "RelaySettings",
    "Settings",
    "TopicSettings",
    "broker_class",
    "cached",
    "changed",
    "database_of_broker",
    "forget",
    "make_broker",
    "project",
    "read",
    "settings",
    "take_groups_from",
    "topic_settings",
    "topics_of",
]

RETRY_DELAYS = tuple(
    timedelta(seconds=seconds)
    for seconds in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)
"""RocketMQ's delay levels, the default of `RetryPolicy`. Source: apache/rocketmq MessageStoreConfig, messageDelayLevel."""

F = TypeVar("F", bound=Callable[..., Any])

_caches: list[Callable[[], None]] = []  # functions that clear the caches of `cached` functions


def cached(function: F) -> F:
    """Cache the results of a function that reads settings, like `functools.cache`, but only until `OUTBOX` changes."""
    cached = cache(function)
    _caches.append(cached.cache_clear)
    return cast("F", cached)


@cached
def settings() -> Settings:
    """
    Return the current settings.

    Raises:
        ConfigurationError: a name is unknown, a value is wrong, or two brokers have a topic of the same name.
    """
    section = _add_reserved_topics(read(getattr(django_settings, "OUTBOX", {})))
    return _change(section) if _change else section


def _add_reserved_topics(settings: Settings) -> Settings:
    """Return the settings with the topics that a broker has without an entry in TOPICS (`Broker.reserved_topics`)."""
    # A broker that has entries in TOPICS is not imported here, because settings are read before Django's apps are ready.
    used = {topic.broker for topic in settings.topics.values()}
    added: dict[str, TopicSettings] = {}
    for alias, broker in settings.brokers.items():
        for name in () if alias in used else _reserved_by(broker):
            other = added.get(name) or settings.topics.get(name)
            if other is not None:
                raise ConfigurationError(
                    f"Topic {name!r} is reserved for the broker {alias!r}, but OUTBOX assigns it to {other.broker!r}.",
                    hint="Keep one of the two brokers, or rename the other topic.",
                )
            added[name] = TopicSettings(broker=alias)
    return replace(settings, topics=settings.topics | added) if added else settings


def _reserved_by(broker: BrokerSettings) -> tuple[str, ...]:
    try:
        names: tuple[str, ...] = getattr(import_string(broker.backend), "reserved_topics", ())
    except ImportError:  # E003 reports it
        return ()
    return names


def project() -> str:
    """
    Return the name of this project: `OUTBOX["PROJECT"]`, or the package of WSGI_APPLICATION or ASGI_APPLICATION, or "".

    The package of ROOT_URLCONF is not used, because the tests of many projects replace it.
    """
    application = getattr(django_settings, "WSGI_APPLICATION", None) or getattr(django_settings, "ASGI_APPLICATION", None)
    return settings().project or str(application or "").partition(".")[0]


@cached
def topic_settings(name: str) -> TopicSettings:
    """
    Return the settings of a topic, with its type filled in.

    Raises:
        UnknownTopic: the topic is not in `OUTBOX["TOPICS"]`.
    """
    topics = settings().topics
    if name not in topics:
        close = difflib.get_close_matches(name, topics, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f'Add it: OUTBOX["TOPICS"]["{name}"] = {{}}.'
        raise UnknownTopic(f'Topic {name!r} is not in OUTBOX["TOPICS"].', hint=hint)
    topic = topics[name]
    if topic.type is None:
        kind = TopicType.TRANSACTION if broker_has(topic.broker, "HalfMessages") else TopicType.NORMAL
        topic = replace(topic, type=kind)
    return topic


@cached
def broker_class(alias: str) -> type[Broker]:
    """
    Return a broker's class.

    Raises:
        ConfigurationError: the alias is unknown, or its BACKEND cannot be imported or is no Broker.
    """
    brokers = settings().brokers
    if alias not in brokers:
        raise ConfigurationError(
            f'Broker {alias!r} is not in OUTBOX["BROKERS"] ({", ".join(sorted(brokers))}).', hint="Add it, or correct the name."
        )
    path = brokers[alias].backend
    try:
        backend = import_string(path)
    except ImportError as error:
        raise ConfigurationError(
            f'OUTBOX["BROKERS"]["{alias}"]["BACKEND"] {path!r} cannot be imported: {error}.',
            hint=_how_to_import(path, error),
        ) from error
    base: type[Broker] = import_string("outbox.brokers.base.Broker")
    if not (isinstance(backend, type) and issubclass(backend, base)):
        raise ConfigurationError(
            f'OUTBOX["BROKERS"]["{alias}"]["BACKEND"] {path!r} is not a Broker class.',
            hint="Name a subclass of outbox.brokers.base.Broker.",
        )
    return backend


def broker_has(alias: str, capability: str) -> bool:
    """Return whether a broker has a capability, which is named by its class in `outbox.brokers.capabilities`."""
    return bool(import_string(f"outbox.brokers.capabilities.{capability}").has(broker_class(alias)))


def database_of_broker(alias: str) -> str:
    """Return the database alias of a broker that is stored in a database."""
    return str(settings().brokers[alias].options.get("DATABASE", "default"))


# OPTIONS that tell servers apart, and values with which they are left out of the text.
SERVER_OPTIONS = ("NODES", "SERVERS", "ENDPOINTS", "NAMESPACE", "VIRTUAL_HOST", "DATABASE")
DEFAULTS = (None, "", "/", "default")


def server(alias: str) -> str:
    """Return a text that names a broker's server: `RabbitMQBroker with NODES rabbit-1, rabbit-2`; "" for an unknown alias."""
    broker = settings().brokers.get(alias)
    if broker is None:
        return ""
    options = {name: broker.options.get(name) for name in SERVER_OPTIONS}
    parts = [
        f"{name} {', '.join(sorted(map(str, value))) if isinstance(value, list | tuple) else value}"
        for name, value in options.items()
        if value not in DEFAULTS
    ]
    return f"{broker.backend.rpartition('.')[2]}{' with ' if parts else ''}{'; '.join(parts)}"


def _how_to_import(path: str, error: ImportError) -> str:
    """Return a sentence that says how a broker can be imported. A broker's extra is named like its folder."""
    missing = (error.name or "").partition(".")[0]
    if missing in ("", "outbox"):
        return f"Correct the path, which names a module and a class in it, such as {BrokerSettings().backend}."
    if path.startswith("outbox.brokers."):
        return f"Run: pip install 'django-transactional-outbox[{path.split('.')[2]}]'"
    return f"Correct the path, or install {missing}."


_groups_of: Callable[[str], Iterable[str]] | None = None  # set when the first consumer is registered


def take_groups_from(source: Callable[[str], Iterable[str]]) -> None:
    """Register the function that returns a topic's consumer groups. It is in `consuming`, which this package cannot import."""
    global _groups_of
    _groups_of = source


def topics_of(alias: str) -> list[TopicSpec]:
    """Return the topics of a broker, sorted by name."""
    return [topic_spec(name) for name in sorted(name for name, topic in settings().topics.items() if topic.broker == alias)]


def topic_spec(name: str) -> TopicSpec:
    """
    Return a topic as its broker creates it. If the broker has no half messages, type transaction becomes normal (W009).

    Raises:
        UnknownTopic: the topic is not in `OUTBOX["TOPICS"]`.
    """
    topic = topic_settings(name)
    kind = topic.type or TopicType.NORMAL
    if kind is TopicType.TRANSACTION and not broker_has(topic.broker, "HalfMessages"):
        kind = TopicType.NORMAL
    groups = _groups_of(name) if _groups_of else ()
    return TopicSpec(name, kind, topic.queues, topic.retention, settings().retention, frozenset(groups))


def make_broker(alias: str) -> Broker:
    """Create a broker from settings. A broker must not be shared between processes or threads."""
    return broker_class(alias)(alias, settings().brokers[alias].options, topics_of(alias))


_change: Callable[[Settings], Settings] | None = None  # the function of the innermost `changed` block; None outside of blocks


@contextmanager
def changed(change: Callable[[Settings], Settings]) -> Iterator[None]:
    """Pass all settings through a function inside the block, even if a test changes Django's settings meanwhile."""
    global _change
    before, _change = _change, change
    forget()
    try:
        yield
    finally:
        _change = before
        forget()


def forget() -> None:
    """Clear the caches of all `cached` functions, so that the settings are read again at their next use."""
    for clear in _caches:
        clear()


def _on_setting_changed(*, setting: str, **kwargs: Any) -> None:
    if setting == "OUTBOX":
        forget()


setting_changed.connect(_on_setting_changed)
