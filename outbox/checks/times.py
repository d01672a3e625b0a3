"""Check durations in the settings that depend on each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Caution

from outbox import conf
from outbox.brokers.base import Broker
from outbox.brokers.capabilities import HalfMessages
from outbox.brokers.validation import problem_of_retention
from outbox.checks.decorators import check
from outbox.checks.settings import known_settings, known_topics
from outbox.consuming.register import all_consumers
from outbox.message import TopicType

MARGIN = timedelta(seconds=5)  # for the relay's database statements before and after a send


@check()
def check_leases() -> Iterable[CheckMessage]:
    """
    W019: A relay's lease on a batch is shorter than the longest send of a batch plus 5 s.

    Nothing is lost, but while a broker is that slow, two relays take the batch from each other again and again. Raise
    `OUTBOX["RELAY"]["LEASE"]`, or lower the timeouts in the broker's OPTIONS.
    """
    lease = known_settings().relay.lease
    for alias, broker, options in _brokers_in_use():
        needed = max(broker.limits(options, topic).send for topic in conf.topics_of(alias)) + MARGIN
        if lease < needed:
            yield Caution(
                f'OUTBOX["RELAY"]["LEASE"] is {_seconds(lease)}, but a send to broker {alias!r} may take '
                f"{_seconds(needed - MARGIN)}, and meanwhile another relay takes the batch over.",
                hint=f"Set it to {_seconds(needed)} or more, or lower the timeouts in the broker's OPTIONS.",
                id="outbox.W019",
            )


@check()
def check_retention() -> Iterable[CheckMessage]:
    """
    E020: Batches are pruned while brokers may still check back about their half messages.

    Each of these check-backs would be answered UNKNOWN, with an alert. Raise `OUTBOX["RETENTION"]`.
    """
    retention = known_settings().retention
    two_phase = {topic.broker for _, topic, broker in known_topics() if _is_two_phase(topic, broker)}
    return [
        Error(
            f'OUTBOX["RETENTION"] is {retention}, but broker {alias!r} may check back about a half message for {age}.',
            hint="Raise RETENTION above that time.",
            id="outbox.E020",
        )
        for alias, broker, options in _brokers_in_use()
        if alias in two_phase
        and retention < (age := max(broker.limits(options, topic).check_back for topic in conf.topics_of(alias)))
    ]


@check()
def check_inbox_retention() -> Iterable[CheckMessage]:
    """
    W052: A broker keeps messages of a topic longer than inbox rows are kept.

    Set `OUTBOX["RETENTION"]` to the topic's `RETENTION` or more, or lower the topic's `RETENTION`.
    """
    for alias, broker, options in _brokers_in_use():
        for topic in conf.topics_of(alias):
            kept = broker.limits(options, topic).redelivery
            setting = f'OUTBOX["TOPICS"]["{topic.name}"]["RETENTION"]'
            subject = f"Broker {alias!r} keeps messages of topic {topic.name!r} for {kept} ({setting})"
            if kept and (problem := problem_of_retention(subject, kept, topic.remembered, f"lower {setting}")):
                yield Caution(problem.msg, hint=problem.hint, id="outbox.W052")


@check()
def check_time_limits() -> Iterable[CheckMessage]:
    """
    W050: A handler's `time_limit` is longer than its broker lets a consumer hold a delivery.

    If a handler runs for longer than the broker's limit, its message is delivered to another process, too, and handled twice at
    the same time; the inbox lets only one of the two handlers commit. Lower the `time_limit`, or raise the broker's limit
    (RabbitMQ: `CONSUMER_TIMEOUT`).
    """
    topics = {name: topic for name, topic, _ in known_topics()}
    limits = {
        topic.name: broker.limits(options, topic).handling
        for alias, broker, options in _brokers_in_use()
        for topic in conf.topics_of(alias)
    }
    for handler in all_consumers():
        limit = limits.get(handler.topic)
        if limit is not None and handler.time_limit is not None and limit < handler.time_limit:
            alias = topics[handler.topic].broker
            text = (
                f"{handler.name} has time_limit={handler.time_limit}, but broker {alias!r} lets a consumer hold a delivery "
                f"for {limit} only."
            )
            hint = f"Lower it to {limit}, or raise the limit in the broker's OPTIONS and on the server."
            yield Caution(text, hint=hint, id="outbox.W050")


def _is_two_phase(topic: conf.TopicSettings, broker: type[Broker]) -> bool:
    return topic.type is TopicType.TRANSACTION and HalfMessages.has(broker)


def _brokers_in_use() -> Iterator[tuple[str, type[Broker], Mapping[str, Any]]]:
    """Yield the brokers that have topics, each with its class and options, except brokers that E003 or E004 reports."""
    classes = {topic.broker: broker for _, topic, broker in known_topics()}
    for alias, broker in sorted(classes.items()):
        options = known_settings().brokers[alias].options
        if not any(problem.is_serious() for problem in broker.check_settings(options)):
            yield alias, broker, options


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"
