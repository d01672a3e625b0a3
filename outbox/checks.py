"""System checks: each wrong value of `OUTBOX`, each message type that cannot travel, each database that will not do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django.core import checks
from django.core.checks import CheckMessage, Error, register
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.backends.postgresql.psycopg_any import is_psycopg3

from outbox import conf
from outbox.brokers.base import Broker
from outbox.check_back.ask import make_signer
from outbox.check_back.loop import ask_as_set
from outbox.check_back.rate import read_rate
from outbox.errors import ConfigurationError, UnknownTopic
from outbox.message import Message, TopicType, message_types
from outbox.models import MessageRow
from outbox.publish.rules import TOPIC_RULE, is_topic_name


def register_checks() -> None:
    """Register all checks; called once, when the app is ready."""
    register(check_settings)
    register(check_topic_names)
    register(check_brokers)
    register(check_topic_types)
    register(check_message_types)
    register(check_database)
    register(check_check_back)


def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """E001: `OUTBOX` holds an unknown name or a wrong value."""
    try:
        conf.settings()
    except ConfigurationError as error:
        return [Error(str(error), hint="outbox/conf.py lists all settings with their types.", id="outbox.E001")]
    return []


def check_topic_names(**kwargs: Any) -> list[CheckMessage]:
    """E002: a topic has a name that not every broker takes."""
    return [
        Error(f'OUTBOX["TOPICS"] has a topic called {name!r}.', hint=TOPIC_RULE, id="outbox.E002")
        for name in _settings().topics
        if not is_topic_name(name)
    ]


def check_brokers(**kwargs: Any) -> list[CheckMessage]:
    """E003: a broker cannot be imported. E004, W004: it finds fault with its OPTIONS."""
    found: list[CheckMessage] = []
    for alias, broker in _settings().brokers.items():
        try:
            backend = conf.broker_class(alias)
        except ConfigurationError as error:
            found.append(Error(str(error), hint=_topics_hint(alias), id="outbox.E003"))
            continue
        for problem in backend.check_options(broker.options):
            text = f'OUTBOX["BROKERS"]["{alias}"]: {problem.text}'
            kind, number = (Error, "outbox.E004") if problem.is_error else (checks.Warning, "outbox.W004")
            found.append(kind(text, hint=problem.hint, id=number))
    return found


def check_topic_types(**kwargs: Any) -> list[CheckMessage]:
    """E008: a topic is of a type that its broker does not offer. W009: half messages where there are none."""
    found: list[CheckMessage] = []
    for name, topic in _settings().topics.items():
        with suppress(ConfigurationError):  # E003 has said it
            found.extend(_problems_of_type(name, topic, conf.broker_class(topic.broker)))
    return found


def check_message_types(**kwargs: Any) -> list[CheckMessage]:
    """E005: a message type names no topic, and is no base of others. E006: its topic is not in settings. E013: its mask."""
    return [problem for kind in message_types().values() for problem in _problems_of(kind)]


def check_database(**kwargs: Any) -> list[CheckMessage]:
    """E007: the database that messages go to is not PostgreSQL by psycopg 3. (Too old a server is refused by Django.)"""
    alias = router.db_for_write(MessageRow)
    vendor = connections[alias].vendor
    if vendor == "postgresql" and is_psycopg3:
        return []
    what = f"is {vendor}" if vendor != "postgresql" else "is reached by psycopg2"
    return [
        Error(
            f"Database {alias!r} {what}. The outbox needs PostgreSQL 13 or later, by psycopg 3.",
            hint='Set its ENGINE to "django.db.backends.postgresql" and install psycopg, or route the models of '
            "the app outbox to such a database.",
            id="outbox.E007",
        )
    ]


def check_check_back(**kwargs: Any) -> list[CheckMessage]:
    """E010: a rate that cannot be read. E011: a secret that is none. E012: a URL that cannot be asked."""
    settings = _settings().check_back
    found: list[CheckMessage] = []
    try:
        read_rate(settings.throttle)
    except ConfigurationError as error:
        found.append(Error(str(error), hint="A time is s, min, h or d, or a whole number of them.", id="outbox.E010"))
    for place, secret in enumerate(settings.secrets, start=1):
        try:
            make_signer(secret)
        except ConfigurationError as error:
            text = f'OUTBOX["CHECK_BACK"]["SECRETS"], number {place}: {error}'
            found.append(Error(text, hint="Whoever signs and whoever verifies need the same one.", id="outbox.E011"))
    return found or _problems_of_url(settings)


def _problems_of_type(name: str, topic: conf.TopicSettings, broker: type[Broker]) -> Iterator[CheckMessage]:
    offered = {
        TopicType.FIFO: (broker.supports_order, "keeps no order"),
        TopicType.DELAY: (broker.supports_delay, "delays nothing"),
        TopicType.TRANSACTION: (broker.supports_half_messages, "has no half messages"),
    }
    is_offered, what = offered.get(topic.type or TopicType.NORMAL, (True, ""))
    if is_offered:
        return
    text = f'OUTBOX["TOPICS"]["{name}"] is of type {topic.type}, and its broker {topic.broker!r} ({broker.__name__}) {what}.'
    if topic.type is TopicType.TRANSACTION:
        yield checks.Warning(text, hint='Its messages are sent one-phase. Write "normal", or leave TYPE out.', id="outbox.W009")
    else:
        yield Error(text, hint="Give the topic another type, or another broker.", id="outbox.E008")


def _problems_of_url(settings: conf.CheckBackSettings) -> list[CheckMessage]:
    if not settings.url:
        return []
    try:
        ask_as_set(DEFAULT_DB_ALIAS)
    except ConfigurationError as error:
        hint = f'Without OUTBOX["CHECK_BACK"]["URL"] ({settings.url!r}), relays ask the database themselves.'
        return [Error(str(error), hint=hint, id="outbox.E012")]
    return []


def _settings() -> conf.Settings:
    """Give the settings; empty ones where E001 has said that they are wrong."""
    try:
        return conf.settings()
    except ConfigurationError:
        return conf.Settings(brokers={})


def _problems_of(kind: type[Message]) -> list[CheckMessage]:
    return [*_problems_of_topic(kind), *_problems_of_mask(kind)]


def _problems_of_mask(kind: type[Message]) -> Iterator[CheckMessage]:
    fields = kind.__struct_fields__
    for name in kind._meta.mask:
        if name not in fields:
            yield Error(
                f"Message type {kind.__module__}.{kind.__qualname__} masks {name!r}, which is none of its fields.",
                hint=f"Its fields are {', '.join(fields)}. A field that is misspelt here would be shown.",
                id="outbox.E013",
            )


def _problems_of_topic(kind: type[Message]) -> list[CheckMessage]:
    topic = kind._meta.topic
    name = f"{kind.__module__}.{kind.__qualname__}"
    if topic:
        try:
            conf.topic_settings(topic)
        except UnknownTopic as error:
            return [Error(f"Message type {name}: {error}", id="outbox.E006")]
        except ConfigurationError:  # E001 or E003 has said it
            return []
    elif not kind.__subclasses__():
        hint = 'Add `class Meta: topic = "..."` to it.'
        return [Error(f"Message type {name} names no topic: it cannot be published.", hint=hint, id="outbox.E005")]
    return []


def _topics_hint(alias: str) -> str | None:
    topics = [name for name, topic in _settings().topics.items() if topic.broker == alias]
    return f"Topics that go there: {', '.join(sorted(topics))}." if topics else None
