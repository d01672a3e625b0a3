"""Check that brokers can be reached, and have the topics of settings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

from outbox import conf
from outbox.consuming.owners import set_owners
from outbox.errors import BrokerUnavailable
from outbox.logs import line_of
from outbox.monitoring.doctor.finding import Finding, Level


def check() -> Iterator[Finding]:
    """Check each broker that has topics."""
    for alias in sorted(conf.settings().brokers):
        if topics := conf.topics_of(alias):
            yield from _check(f"broker {alias!r}", alias, len(topics))


def _check(subject: str, alias: str, topics: int) -> Iterator[Finding]:
    began = time.monotonic()
    try:
        with closing(conf.make_broker(alias)) as broker:
            set_owners(broker)
            problems = broker.check()
    except BrokerUnavailable as error:
        hint = f'Start it, or correct OUTBOX["BROKERS"]["{alias}"]["OPTIONS"]. Messages wait meanwhile; none is lost.'
        yield Finding(Level.ERROR, subject, f"cannot be reached: {line_of(error)}", hint)
        return
    for problem in problems:
        yield Finding(Level.WARNING, subject, problem.text, problem.hint)
    if not problems:
        took = time.monotonic() - began
        count = f"{topics} topic{'' if topics == 1 else 's'}"
        text = f"{conf.broker_class(alias).__name__}, {count} as in settings, answers in {took * 1000:.0f} ms"
        yield Finding(Level.OK, subject, text)
