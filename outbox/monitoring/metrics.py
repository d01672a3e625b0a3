"""
Metrics for Prometheus, read from databases and brokers at each scrape. They need the extra `metrics`.

Each process returns the same metrics, so scrape one address only. In urls.py, not open to the public::

    path("metrics/", outbox.monitoring.metrics.view)

To add them to an existing registry: `REGISTRY.register(OutboxCollector())`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import psycopg
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from outbox.database import outside_transactions
from outbox.errors import NotMigrated, TablesLocked
from outbox.findings import Finding
from outbox.monitoring.attention import find_attention
from outbox.monitoring.connection import connected
from outbox.monitoring.status import Status, read_status
from outbox.relay.hosts import databases

STATES = ("waiting", "delayed", "released", "claimed", "prepared", "dead")
DEFERRED_STATES = ("waiting", "asleep", "in_doubt", "held", "dead")


class OutboxCollector(Collector):
    """Reads all metrics at each scrape. The `..._up` metric of a database or broker that cannot be reached is 0."""

    def describe(self) -> Iterable[Metric]:
        """Return no metrics, so that registering the collector reads nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        answers = {alias: _read(alias) for alias in databases()}
        up = _gauge("outbox_database_up", "Whether the database can be reached.", "database")
        for alias, answer in answers.items():
            up.add_metric([alias], answer is not None)
        readable = [answer for answer in answers.values() if answer is not None]
        statuses = [status for status, _ in readable]
        yield up
        yield from _topics(statuses)
        yield from _processes(statuses)
        yield from _findings(readable)
        yield from _groups(statuses)
        yield from _deferred(statuses)


def _read(alias: str) -> tuple[Status, list[Finding]] | None:
    """Return the status of a database, and its findings; None if they cannot be read."""
    try:
        with connected(alias, "outbox metrics") as connection:
            status = read_status(connection, alias)
            return status, list(find_attention(connection, status))
    except (NotMigrated, TablesLocked, psycopg.Error):
        return None


def _gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=labels)


def _topics(statuses: list[Status]) -> Iterator[Metric]:
    messages = _gauge("outbox_messages", "Messages that are not sent, by state.", "database", "topic", "state")
    oldest = _gauge("outbox_oldest_message_seconds", "Age of the oldest message to be sent now.", "database", "topic")
    paused = _gauge("outbox_topic_paused", "Whether an operator has paused the topic.", "database", "topic")
    for status in statuses:
        for topic in status.topics:
            labels = [status.database, topic.name]
            for state in STATES:
                messages.add_metric([*labels, state], getattr(topic, state))
            oldest.add_metric(labels, topic.oldest_seconds or 0)
            paused.add_metric(labels, topic.is_paused)
    return iter((messages, oldest, paused))


def _processes(statuses: list[Status]) -> Iterator[Metric]:
    running = _gauge("outbox_processes", "Processes with a recent heartbeat.", "database", "kind", "broker", "consumer_group")
    breakers = _gauge("outbox_breakers_open", "Relays whose broker, or a topic of it, is unavailable.", "database", "broker")
    for status in statuses:
        live = [process for process in status.processes if not process.is_silent]
        for key in sorted({(process.kind, process.broker, process.consumer_group) for process in status.processes}):
            count = sum((process.kind, process.broker, process.consumer_group) == key for process in live)
            running.add_metric([status.database, *key], count)
        for broker in sorted({topic.broker for topic in status.topics}):
            count = sum(process.kind == "relay" and process.broker == broker and process.breaker != "closed" for process in live)
            breakers.add_metric([status.database, broker], count)
    return iter((running, breakers))


def _findings(readable: list[tuple[Status, list[Finding]]]) -> Iterator[Metric]:
    findings = _gauge("outbox_findings", "What needs attention; gone when its cause is.", "database", "id", "level", "subject")
    missing = _gauge("outbox_missing_numbers", "Messages that a consumer group misses.", "database", "consumer_group", "topic")
    parked = _gauge("outbox_parked_halves", "Half messages whose check-backs have stopped.", "database", "topic")
    answers = _gauge("outbox_check_backs", "Check-backs of the last hour, by answer.", "database", "answer")
    for status, attention in readable:
        for answer, number in status.check_backs.items():
            answers.add_metric([status.database, answer], number)
        for labels, number in Counter((str(finding.id), finding.level_name, str(finding.obj)) for finding in attention).items():
            findings.add_metric([status.database, *labels], number)
        for gap in status.gaps:
            missing.add_metric([status.database, gap.consumer_group, gap.topic], gap.numbers)
        for topic, count in status.parked.items():
            parked.add_metric([status.database, topic], count)
    return iter((findings, missing, parked, answers))


def _groups(statuses: list[Status]) -> Iterator[Metric]:
    up = _gauge("outbox_backlog_up", "Whether the broker of the group can be reached.", "consumer_group", "broker")
    live = _gauge("outbox_consumers", "Consumers with a recent heartbeat.", "consumer_group", "broker")
    backlog = _gauge("outbox_backlog_messages", "Messages that wait for a group.", "consumer_group", "broker", "topic")
    for group in (group_status for status in statuses for group_status in status.groups):
        labels = [group.consumer_group, group.broker]
        up.add_metric(labels, not group.trouble)
        live.add_metric(labels, group.consumers)
        for topic, number in group.waiting.items():
            backlog.add_metric([*labels, topic], number)
    return iter((up, live, backlog))


def _deferred(statuses: list[Status]) -> Iterator[Metric]:
    names = ("database", "consumer_group", "topic")
    messages = _gauge("outbox_deferred_messages", "Deferred messages of a group.", *names, "reason", "state")
    late = _gauge("outbox_deferred_late_seconds", "Seconds since the first deferred message was due.", *names)
    size = _gauge("outbox_deferred_bytes", "Size of the deferred messages of a group.", *names)
    for status in statuses:
        for count in status.deferred:
            labels = [status.database, count.consumer_group, count.topic]
            if count.reason:
                for state in DEFERRED_STATES:
                    messages.add_metric([*labels, count.reason, state], getattr(count, state))
            else:
                late.add_metric(labels, count.late_seconds or 0)
                size.add_metric(labels, count.bytes)
    return iter((messages, late, size))


@outside_transactions
@require_safe
def view(request: HttpRequest) -> HttpResponse:
    """Return the metrics of the outbox, without those of the default registry."""
    registry = CollectorRegistry()
    registry.register(OutboxCollector())
    return HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
