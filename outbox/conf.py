"""
The one settings object: `OUTBOX` in Django's settings, typed, frozen, read at use.

`settings()` gives it; it is read again after `setting_changed`, so `override_settings` works. Every name stands here
with its type, default and unit.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from outbox.errors import ConfigurationError, UnknownTopic
from outbox.message import TopicSpec, TopicType, prepare

if TYPE_CHECKING:  # settings are read without importing any broker
    from outbox.brokers.base import Broker

RETRY_DELAYS = tuple(
    timedelta(seconds=seconds)
    for seconds in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)
"""RocketMQ's 18 delay levels. Source: apache/rocketmq MessageStoreConfig, messageDelayLevel."""


Count = Annotated[int, msgspec.Meta(ge=1)]

MAY_BE_NOTHING = frozenset({"sweep_age", "wait"})
"""Durations that may be 0; every other one must be longer than that."""

LIMITS = {"retry_base": "retry_limit", "breaker_base": "breaker_limit", "idle_wait_min": "idle_wait_max"}
"""Durations that grow, each with the one it never exceeds."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=str.upper):
    """A dict of settings: names in capitals, unknown ones refused."""


class BrokerSettings(_Section, frozen=True):
    """One entry of BROKERS."""

    backend: str = "outbox.brokers.embedded.EmbeddedBroker"  # dotted path of a Broker class
    options: dict[str, Any] = {}  # the broker's own, checked by it


class TopicSettings(_Section, frozen=True):
    """One entry of TOPICS."""

    broker: str = "default"  # which one carries it
    type: TopicType | None = None  # by default transaction where the broker has half messages, else normal
    queues: Count = 4  # so many messages without a key may travel side by side
    retention: timedelta = timedelta(days=7)  # how long the broker keeps them


class RelaySettings(_Section, frozen=True):
    """How the relay works. Safety never depends on a time given here."""

    batch_size: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 500  # messages per topic in one claim, 1 to 2,000
    lease: timedelta = timedelta(seconds=30)  # other relays leave a claimed batch alone that long
    lanes: Count = 16  # at most so many relays at once in a database
    sweep_age: timedelta = timedelta(seconds=10)  # a decided batch that old is ended again
    retry_base: timedelta = timedelta(seconds=1)  # back-off of an unsure message: base x 2^tries, jittered
    retry_limit: timedelta = timedelta(minutes=5)  # no such wait is longer
    misconfigured_retry: timedelta = timedelta(seconds=30)  # wait of what only a person can set right
    breaker_threshold: Count = 3  # batches in a row that found the broker unavailable
    breaker_base: timedelta = timedelta(seconds=1)  # how long the breaker stays open: base x 2^probes, jittered
    breaker_limit: timedelta = timedelta(seconds=5)  # and no longer: sending goes on soon after the broker is back
    idle_wait_min: timedelta = timedelta(milliseconds=20)  # an idle relay looks again after this, then less and less often
    idle_wait_max: timedelta = timedelta(seconds=1)  # but at least this often, though nobody wakes it
    task_time: timedelta = timedelta(seconds=30)  # a Celery task drains no longer than this
    slice_bytes: Count = 8 * 1024 * 1024  # bodies loaded at once
    partition_days: Count = 7  # days of the message table made ahead


class ConsumerSettings(_Section, frozen=True):
    """How consumers receive. A handler slower than INVISIBLE may see its message delivered to another process too."""

    batch_size: Count = 32  # messages received at once, at most
    invisible: timedelta = timedelta(seconds=60)  # how long other consumers do not see what one has received
    wait: timedelta = timedelta(seconds=1)  # how long one receive waits for messages
    settle: timedelta = timedelta(minutes=1)  # a number missing longer than this is a gap
    task_time: timedelta = timedelta(seconds=30)  # a Celery task consumes no longer than this


class CheckBackSettings(_Section, frozen=True):
    """The check-back endpoint."""

    url: str = ""  # where relays ask about half messages; "": they ask the database themselves
    secrets: list[str] = []  # Standard Webhooks secrets (`whsec_...`); the first signs, all verify
    tolerance: timedelta = timedelta(minutes=5)  # a signature's time may differ from ours by this, 5 minutes at most
    lock_timeout: timedelta = timedelta(seconds=2)  # an answer waits no longer for a lock; UNKNOWN then
    statement_timeout: timedelta = timedelta(seconds=5)  # nor for one statement, or for the connection
    throttle: str = "600/s"  # rate of answers, as in DRF, with any whole number of seconds


class AuditSettings(_Section, frozen=True):
    """One entry of AUDIT: rows of a model, each of which owes the world a message published `about=` it."""

    model: str  # "shop.Order"
    expects: str  # the message type's name on the wire, "OrderPlaced"
    where: str = ""  # SQL: only these rows; the table is called b
    at: str = ""  # the field that says when a row was written; needed once messages have been pruned


class Settings(_Section, frozen=True):
    """The whole dict."""

    brokers: dict[str, BrokerSettings] = msgspec.field(default_factory=lambda: {"default": BrokerSettings()})  # by alias
    topics: dict[str, TopicSettings] = {}  # by name; a message goes to no other
    relay: RelaySettings = RelaySettings()  # below
    consumer: ConsumerSettings = ConsumerSettings()  # below
    check_back: CheckBackSettings = CheckBackSettings()  # below
    audit: dict[str, AuditSettings] = {}  # business rows that owe a message, by a name for them
    nudge: bool = True  # False: nobody is woken; relays find everything by their sweep
    celery_queue: str = "outbox"  # where nudges go; workers of the outbox listen there
    retention: timedelta = timedelta(days=7)  # sent messages, inbox rows and records stay that long
    dedupe_retention: timedelta = timedelta(days=7)  # a dedupe key is remembered that long


def read(raw: object) -> Settings:
    """
    Turn the `OUTBOX` dict into settings.

    Raises:
        ConfigurationError: a name is unknown, or a value is wrong; the text names the place.
    """
    prepare(Settings)
    try:
        found = msgspec.convert(raw, Settings)
    except msgspec.ValidationError as error:
        raise ConfigurationError(_explain(_name_the_entry(str(error), raw))) from error
    _insist_on_durations(found, "OUTBOX")
    for name, topic in found.topics.items():
        if topic.broker not in found.brokers:
            raise ConfigurationError(
                f'OUTBOX["TOPICS"]["{name}"] names the broker {topic.broker!r}, which is not in OUTBOX["BROKERS"] '
                f"({', '.join(sorted(found.brokers)) or 'empty'}). Add it there, or correct the name."
            )
    return found


def _explain(text: str) -> str:
    if "unknown field" in text:
        unknown = text.split("`")[1]
        known = {name.upper() for section in _Section.__subclasses__() for name in section.__struct_fields__}
        close = difflib.get_close_matches(unknown, known, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        return f"OUTBOX has an unknown setting {unknown!r}: {text}.{hint}"
    hint = " Write timedelta(seconds=...), or an ISO 8601 duration such as 'PT30S'." if "duration" in text else ""
    return f"OUTBOX has a wrong value: {text}.{hint}"


def _name_the_entry(text: str, raw: Any) -> str:
    """Put a broker's or topic's name where msgspec writes `$.TOPICS[...]`."""
    for section, kind in (("BROKERS", BrokerSettings), ("TOPICS", TopicSettings)):
        place = f"$.{section}[...]"
        if place in text:
            for name, entry in raw[section].items():
                try:
                    msgspec.convert(entry, kind)
                except msgspec.ValidationError:
                    return text.replace(place, f"$.{section}[{name!r}]")
    return text


def _insist_on_durations(section: _Section, place: str) -> None:
    """Raise ConfigurationError for a duration of nothing or less, and for one beyond its limit."""
    durations = {name: value for name in section.__struct_fields__ if isinstance(value := getattr(section, name), timedelta)}
    for name, value in durations.items():
        if value < timedelta() or (not value and name not in MAY_BE_NOTHING):
            raise ConfigurationError(f'{place}["{name.upper()}"] is {value}; it must be longer than nothing.')
    for name, limit in LIMITS.items():
        if name in durations and durations[name] > durations[limit]:
            raise ConfigurationError(
                f'{place}["{name.upper()}"] is {durations[name]}, longer than its limit, '
                f'{place}["{limit.upper()}"] of {durations[limit]}. Lower the one or raise the other.'
            )
    for name in section.__struct_fields__:
        inner = getattr(section, name)
        for key, entry in inner.items() if isinstance(inner, dict) else [(None, inner)]:
            if isinstance(entry, _Section):
                _insist_on_durations(entry, f'{place}["{name.upper()}"]' + (f'["{key}"]' if key is not None else ""))


@cache
def settings() -> Settings:
    """Give the settings as they are now. Raises ConfigurationError as `read` does."""
    found = read(getattr(django_settings, "OUTBOX", {}))
    return _change(found) if _change else found


def topic_settings(name: str) -> TopicSettings:
    """
    Give one topic's settings, its type filled in.

    Raises:
        UnknownTopic: the topic is not in `OUTBOX["TOPICS"]`.
    """
    return _topic_settings(name)


@cache
def _topic_settings(name: str) -> TopicSettings:
    topics = settings().topics
    if name not in topics:
        close = difflib.get_close_matches(name, topics, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f'Add it: OUTBOX["TOPICS"]["{name}"] = {{}}.'
        raise UnknownTopic(f'Topic {name!r} is not in OUTBOX["TOPICS"]. {hint}')
    topic = topics[name]
    if topic.type is None:
        is_two_phase = broker_class(topic.broker).supports_half_messages
        kind = TopicType.TRANSACTION if is_two_phase else TopicType.NORMAL
        topic = msgspec.structs.replace(topic, type=kind)
    return topic


@cache
def broker_class(alias: str) -> type[Broker]:
    """
    Give a broker's class.

    Raises:
        ConfigurationError: the alias is unknown, or its BACKEND cannot be imported or is no Broker.
    """
    brokers = settings().brokers
    if alias not in brokers:
        raise ConfigurationError(
            f'Broker {alias!r} is not in OUTBOX["BROKERS"] ({", ".join(sorted(brokers))}). Add it, or correct the name.'
        )
    path = brokers[alias].backend
    try:
        backend = import_string(path)
    except ImportError as error:
        raise ConfigurationError(
            f'OUTBOX["BROKERS"]["{alias}"]["BACKEND"] {path!r} cannot be imported: {error}. '
            "Correct the path, or install the broker's extra."
        ) from error
    base: type[Broker] = import_string("outbox.brokers.base.Broker")
    if not (isinstance(backend, type) and issubclass(backend, base)):
        raise ConfigurationError(
            f'OUTBOX["BROKERS"]["{alias}"]["BACKEND"] {path!r} is not a Broker class. '
            "Name a subclass of outbox.brokers.base.Broker."
        )
    return backend


def topics_of(alias: str) -> list[TopicSpec]:
    """Give the topics of a broker, types filled in, sorted by name."""
    found = []
    for name in sorted(settings().topics):
        topic = topic_settings(name)
        if topic.broker == alias:
            assert topic.type is not None
            found.append(TopicSpec(name, topic.type, topic.queues, topic.retention))
    return found


def make_broker(alias: str) -> Broker:
    """Create a broker from settings: a new one at each call, for the process and thread that uses it."""
    return broker_class(alias)(alias, settings().brokers[alias].options, topics_of(alias))


_change: Callable[[Settings], Settings] | None = None


@contextmanager
def changed(change: Callable[[Settings], Settings]) -> Iterator[None]:
    """Have all settings pass through a function, for as long as a test lasts, whatever it does to Django's meanwhile."""
    global _change
    before, _change = _change, change
    forget()
    try:
        yield
    finally:
        _change = before
        forget()


def forget() -> None:
    """Read the settings again at their next use."""
    settings.cache_clear()
    _topic_settings.cache_clear()
    broker_class.cache_clear()


def _on_setting_changed(*, setting: str, **kwargs: Any) -> None:
    if setting == "OUTBOX":
        forget()


setting_changed.connect(_on_setting_changed)
