"""Check `OUTBOX`: names and values, brokers, topics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution

from outbox import conf
from outbox.brokers.base import Broker
from outbox.brokers.capabilities import HalfMessages
from outbox.checks.decorators import check
from outbox.errors import ConfigurationError
from outbox.message import TopicType
from outbox.publishing.rules import TOPIC_RULE, is_topic_name


@check()
def check_settings() -> Iterable[CheckMessage]:
    """
    E001: `OUTBOX` has an unknown name or a wrong value.

    The error names the setting, and the most similar known name. Durations are `timedelta`, and greater than zero.
    """
    try:
        conf.settings()
    except ConfigurationError as error:
        yield Error(error.message, hint=error.hint, id="outbox.E001")


@check()
def check_topic_names() -> Iterable[CheckMessage]:
    """
    E002: A topic has a name that some brokers do not accept.

    Use 1 to 127 letters, digits, `%`, `_` and `-`.
    """
    return [
        Error(f'OUTBOX["TOPICS"] has a topic called {name!r}.', hint=TOPIC_RULE, id="outbox.E002")
        for name in known_settings().topics
        if not is_topic_name(name)
    ]


@check()
def check_brokers() -> Iterable[CheckMessage]:
    """
    E003: A BACKEND cannot be imported, or is not a broker.

    Correct the path in BACKEND, or install the broker's extra.

    E004, W048: A broker reports a problem of its OPTIONS, or of a topic with these OPTIONS.

    The hint comes from the broker; docs/reference/settings.md lists the options of each broker.
    """
    for alias, broker in known_settings().brokers.items():
        try:
            backend = conf.broker_class(alias)
        except ConfigurationError as error:
            names = sorted(name for name, topic in known_settings().topics.items() if topic.broker == alias)
            topics = f"Its topics are: {', '.join(names)}. " if names else ""
            yield Error(error.message, hint=f"{topics}{error.hint}".strip(), id="outbox.E003")
            continue
        for problem in backend.check_settings(broker.options, conf.topics_of(alias)):
            problem.obj = f'OUTBOX["BROKERS"]["{alias}"]'
            yield problem


@check()
def check_topic_types() -> Iterable[CheckMessage]:
    """
    E008: A topic has a type that its broker does not support.

    Set another type, or another broker.

    W009: A topic is of type transaction, and its broker has no half messages.

    Its messages are sent in one phase. Set TYPE "normal", or remove TYPE.
    """
    for name, topic, broker in known_topics():
        support = {
            TopicType.FIFO: (broker.supports_order, "keeps no order"),
            TopicType.DELAY: (broker.supports_delay, "cannot delay messages"),
            TopicType.TRANSACTION: (HalfMessages.has(broker), "has no half messages"),
        }
        is_supported, lack = support.get(topic.type or TopicType.NORMAL, (True, ""))
        if is_supported:
            continue
        text = f'OUTBOX["TOPICS"]["{name}"] is of type {topic.type}, and its broker {topic.broker!r} ({broker.__name__}) {lack}.'
        if topic.type is TopicType.TRANSACTION:
            yield Caution(text, hint='Its messages are sent in one phase. Set TYPE "normal", or remove TYPE.', id="outbox.W009")
        else:
            hint = "Set another type or another broker for the topic."
            if topic.type is TopicType.DELAY:
                hint = "Remove TYPE: then a message with a delay waits in the outbox's table. Or use another broker."
            yield Error(text, hint=hint, id="outbox.E008")


def known_settings() -> conf.Settings:
    """Return the settings; if they are wrong, which E001 reports, return empty settings."""
    try:
        return conf.settings()
    except ConfigurationError:
        return conf.Settings(brokers={})


def known_topics() -> Iterator[tuple[str, conf.TopicSettings, type[Broker]]]:
    """Yield topics by name with their resolved types and their brokers, except topics with a broker that E003 reports."""
    for name in known_settings().topics:
        with suppress(ConfigurationError):
            topic = conf.topic_settings(name)
            yield name, topic, conf.broker_class(topic.broker)
