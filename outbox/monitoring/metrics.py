"""
Metrics for Prometheus, asked of databases and brokers when they are scraped. Needs the extra `metrics`.

One process tells them for all: scrape one address, not each process. In urls.py, behind what protects it::

    path("metrics/", outbox.monitoring.metrics.view)

Where there is a registry already: `REGISTRY.register(OutboxCollector())`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import psycopg
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from outbox import database
from outbox.consuming.backlog import Backlog, read_backlogs
from outbox.database import outside_transactions
from outbox.errors import NotMigrated
from outbox.monitoring.health import CONNECT_SECONDS
from outbox.monitoring.status import Status, read_status
from outbox.relay.hosts import databases, ensure_fit

# Prometheus gives up after 10 s by default.
NO_LONG_STATEMENT = {"statement_timeout": "8s"}

STATES = ("waiting", "delayed", "released", "claimed", "prepared", "dead")


class OutboxCollector(Collector):
    """Asks at each scrape; a database or broker that cannot be asked shows by its `..._up` of 0."""

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering asks nobody."""
        return []

    def collect(self) -> Iterator[Metric]:
        statuses = {alias: _read(alias) for alias in databases()}
        asked = [status for status in statuses.values() if status is not None]
        up = _gauge("outbox_database_up", "Whether the database could be asked.", "database")
        for alias, status in statuses.items():
            up.add_metric([alias], status is not None)
        yield up
        yield from _topics(asked)
        yield from _processes(asked)
        yield from _troubles(asked)
        yield from _backlogs(read_backlogs())


def _read(alias: str) -> Status | None:
    try:
        with database.connect(
            alias, application_name="outbox metrics", settings=NO_LONG_STATEMENT, connect_timeout=CONNECT_SECONDS
        ) as connection:
            ensure_fit(alias, connection)
            return read_status(connection, alias)
    except (NotMigrated, psycopg.Error):
        return None


def _gauge(name: str, says: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, says, labels=labels)


def _topics(statuses: list[Status]) -> Iterator[Metric]:
    messages = _gauge("outbox_messages", "Messages that are not sent, by where they stand.", "database", "topic", "state")
    oldest = _gauge("outbox_oldest_message_seconds", "Age of the oldest message to be sent now.", "database", "topic")
    paused = _gauge("outbox_topic_paused", "Whether a person has paused the topic.", "database", "topic")
    for status in statuses:
        for topic in status.topics:
            labels = [status.database, topic.name]
            for state in STATES:
                messages.add_metric([*labels, state], getattr(topic, state))
            oldest.add_metric(labels, topic.oldest_seconds or 0)
            paused.add_metric(labels, topic.is_paused)
    return iter((messages, oldest, paused))


def _processes(statuses: list[Status]) -> Iterator[Metric]:
    alive = _gauge("outbox_processes", "Processes heard of in the last 30 s.", "database", "kind", "broker", "consumer_group")
    breakers = _gauge("outbox_breakers_open", "Relays that find their broker unavailable.", "database", "broker")
    for status in statuses:
        heard = [process for process in status.processes if not process.is_silent]
        for key in sorted({(one.kind, one.broker, one.consumer_group) for one in status.processes}):
            count = sum((one.kind, one.broker, one.consumer_group) == key for one in heard)
            alive.add_metric([status.database, *key], count)
        for broker in sorted({topic.broker for topic in status.topics}):
            count = sum(one.kind == "relay" and one.broker == broker and one.breaker != "closed" for one in heard)
            breakers.add_metric([status.database, broker], count)
    return iter((alive, breakers))


def _troubles(statuses: list[Status]) -> Iterator[Metric]:
    concerns = _gauge("outbox_concerns", "What needs a person; outbox_status says it in words.", "database")
    missing = _gauge("outbox_missing_numbers", "Messages that a consumer group misses.", "database", "consumer_group", "topic")
    parked = _gauge("outbox_parked_halves", "Half messages nobody asks about any more.", "database", "topic")
    for status in statuses:
        concerns.add_metric([status.database], len(status.concerns))
        for gap in status.gaps:
            missing.add_metric([status.database, gap.consumer_group, gap.topic], gap.numbers)
        for topic, count in status.parked.items():
            parked.add_metric([status.database, topic], count)
    return iter((concerns, missing, parked))


def _backlogs(backlogs: list[Backlog]) -> Iterator[Metric]:
    up = _gauge("outbox_backlog_up", "Whether the broker could be asked for a group's backlog.", "consumer_group", "broker")
    waiting = _gauge("outbox_backlog_messages", "Messages that wait for a group.", "consumer_group", "broker", "topic")
    for labels, trouble in {(one.consumer_group, one.broker): one.trouble for one in backlogs}.items():
        up.add_metric(labels, not trouble)
    for one in backlogs:
        if one.messages is not None:
            waiting.add_metric([one.consumer_group, one.broker, one.topic], one.messages)
    return iter((up, waiting))


@outside_transactions
@require_safe
def view(request: HttpRequest) -> HttpResponse:
    """Show the outbox's metrics, and no other's."""
    registry = CollectorRegistry()
    registry.register(OutboxCollector())
    return HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
