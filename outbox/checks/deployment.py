"""Checks that matter only in production: `manage.py check --deploy`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import psycopg
from django.core.checks import CheckMessage, Error, register
from django.core.checks import Warning as Caution
from django.db import Error as DatabaseError

from outbox import conf, database, failpoints
from outbox.brokers.capabilities import TransactionalSends
from outbox.checks.decorators import TAG, check
from outbox.checks.settings import known_topics
from outbox.consuming.owners import set_owners
from outbox.database.identity import read_identity
from outbox.errors import BrokerUnavailable
from outbox.findings import Finding, unreachable_broker
from outbox.logs import line_of


@check(deploy=True)
def check_durability() -> Iterable[CheckMessage]:
    """
    E032: Topics use a broker that is for tests.

    Such a broker keeps messages in the memory of one process, and loses them when the process ends. Set another BACKEND.
    (With `--deploy`.)
    """
    return [
        Error(
            f"Broker {alias!r} keeps its messages in the memory of one process.",
            hint="Set a BACKEND that stores messages, or remove BACKEND: the default one stores them.",
            id="outbox.E032",
        )
        for alias in sorted({topic.broker for _, topic, broker in known_topics() if not broker.is_durable})
    ]


@check(deploy=True)
def check_failpoints() -> Iterable[CheckMessage]:
    """
    W033: Failpoints are set.

    Failpoints end processes on purpose, for tests. Remove the environment variable. (With `--deploy`.)
    """
    if os.environ.get(failpoints.VARIABLE):
        text = f"{failpoints.VARIABLE} is set: processes end themselves at these failpoints."
        yield Caution(text, hint="Remove the environment variable.", id="outbox.W033")


@register(TAG, deploy=True)
def check_running_brokers(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """
    Return problems that the topics' brokers find at their servers, as the doctor does; nothing unless `--database` is given.

    Ids: `outbox.broker_away`, `outbox.misconfigured`, `outbox.broker_weak`, `outbox.clock`.
    """
    if not databases:
        return []
    brokers = {topic.broker: broker for _, topic, broker in known_topics()}
    return [
        finding
        for alias, broker in sorted(brokers.items())
        if not broker.check_settings(conf.settings().brokers[alias].options)  # problems of OPTIONS are reported by E004
        for finding in ask_broker(alias)
    ]


def ask_broker(alias: str) -> list[Finding]:
    """Return the problems that a broker finds at its server."""
    try:
        with closing(conf.make_broker(alias)) as broker:
            set_owners(broker)
            if TransactionalSends.has(broker):
                TransactionalSends.of(broker).checked_lanes = dict.fromkeys(_sources(), conf.settings().relay.lanes)
            findings = broker.check()
    except BrokerUnavailable as error:
        return [unreachable_broker(alias, "It cannot be reached.", line_of(error))]
    for finding in findings:
        finding.obj = f"broker {alias!r}"
    return findings


def _sources() -> Iterator[str]:
    """Yield the stable ids of the outboxes, without databases that cannot be reached or are not migrated."""
    for alias in database.outbox_databases():
        with suppress(DatabaseError, psycopg.Error):
            if source := read_identity(database.raw(alias)).source:
                yield source
