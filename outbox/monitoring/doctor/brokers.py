"""Check that brokers can be reached, and have the topics of settings."""

from __future__ import annotations

import time
from collections.abc import Iterator

from outbox import conf
from outbox.checks.deployment import ask_broker
from outbox.errors import BrokerUnavailable
from outbox.monitoring.doctor.finding import Finding, Level


def check() -> Iterator[Finding]:
    """Check each broker that has topics."""
    for alias in sorted(conf.settings().brokers):
        if topics := conf.topics_of(alias):
            yield from _check(f"broker {alias!r}", alias, len(topics))


def _check(subject: str, alias: str, topics: int) -> Iterator[Finding]:
    began = time.monotonic()
    try:
        problems = ask_broker(alias)
    except BrokerUnavailable as error:
        yield Finding(Level.ERROR, subject, error.message.removeprefix(f"Broker {alias!r} "), error.hint)
        return
    for problem in problems:
        yield Finding(Level.WARNING, subject, problem.text, problem.hint)
    if not problems:
        took = time.monotonic() - began
        count = f"{topics} topic{'' if topics == 1 else 's'}"
        text = f"{conf.broker_class(alias).__name__}, {count} as in settings, answers in {took * 1000:.0f} ms"
        yield Finding(Level.OK, subject, text)
