"""Record the messages of brokers, for the audit."""

from __future__ import annotations

import json
import signal
from argparse import ArgumentParser
from typing import Any

import psycopg
from django.core.management.base import BaseCommand
from django.db import DEFAULT_DB_ALIAS

from outbox import conf
from outbox.brokers.capabilities import Receives
from outbox.errors import BrokerUnavailable, ConfigurationError, OutboxError
from outbox.management.exits import unable
from outbox.management.greeting import greet
from outbox.pipeline.job_config import kafka_brokers, readable_brokers
from outbox.pipeline.recorder import STAND_BY_SECONDS, Recorder, recorder_group
from outbox.relay import hosts
from outbox.relay.loops import RepeatingThread

SIGNAL_CHECK_SECONDS = 0.2  # the interval in which the main thread can notice a signal


class Command(BaseCommand):
    help = (
        "Record the messages of brokers for the audit, as a separate consumer group. Kafka, and brokers that keep their messages "
        "in PostgreSQL, need no recorder, because the audit reads them itself. A second recorder of a broker stands by. Ends "
        "cleanly on SIGTERM and SIGINT. Exit code: 0 stopped by a signal or by an option, 1 failed, 2 could not start, or, with "
        "--until-read, database or broker cannot be reached."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--broker", action="append", metavar="ALIAS", help="may be repeated (default: all that need a recorder)"
        )
        parser.add_argument(
            "--topic", action="append", metavar="NAME", help="may be repeated (default: all topics of the broker)"
        )
        parser.add_argument(
            "--database",
            default=DEFAULT_DB_ALIAS,
            metavar="ALIAS",
            help="record the messages of this database's outbox (default: default)",
        )
        parser.add_argument(
            "--group", metavar="NAME", help="consumer group; other databases must not use it (default: outbox-recorder)"
        )
        parser.add_argument(
            "--until-read", action="store_true", help="stop when all messages that are there at the start have been recorded"
        )
        parser.add_argument("--json", action="store_true", help="print the summary as one line of JSON")

    def handle(self, **options: Any) -> None:
        try:
            recorders = _recorders(options)
            hosts.require_sessions(recorder.using for recorder in recorders)
        except OutboxError as error:
            raise unable(error) from error
        greet(self, options, f"Recording {'; '.join(map(_describe, recorders))}.")
        try:
            caught = _catch_signals()
            if options["until_read"]:
                for recorder in recorders:
                    recorder.run(lambda: bool(caught))
            else:
                _run_until_signal(recorders, caught)
        except (BrokerUnavailable, psycopg.Error) as error:
            raise unable(error) from error
        finally:
            for recorder in recorders:
                recorder.close()
        self._report(recorders, as_json=options["json"])

    def _report(self, recorders: list[Recorder], *, as_json: bool) -> None:
        if as_json:
            totals = {recorder.alias: {"received": recorder.received, "written": recorder.written} for recorder in recorders}
            self.stdout.write(json.dumps(totals))
            return
        for recorder in recorders:
            self.stdout.write(f"Broker {recorder.alias!r}: recorded {recorder.written}")


def _recorders(options: dict[str, Any]) -> list[Recorder]:
    [using] = hosts.databases([options["database"]])
    group = options["group"] or recorder_group(using)
    readable = readable_brokers()
    unreadable = conf.settings().brokers.keys() - readable.keys() - kafka_brokers().keys()
    aliases = options["broker"] or sorted(alias for alias in unreadable if Receives.has(conf.broker_class(alias)))
    wanted_topics = set(options["topic"] or ())
    recorders = []
    for alias in aliases:
        if not Receives.has(conf.broker_class(alias)):
            raise ConfigurationError(
                f"Broker {alias!r} only sends, so nothing can be read there. The audit does not look for messages at this broker."
            )
        if alias in readable:
            raise ConfigurationError(f"Broker {alias!r} needs no recorder: the audit reads its tables.")
        topics = {topic.name for topic in conf.topics_of(alias)}
        if chosen := topics & wanted_topics if wanted_topics else topics:
            recorders.append(Recorder(alias, group=group, using=using, topics=chosen))
    if unknown := wanted_topics - {topic for recorder in recorders for topic in recorder.topics}:
        raise ConfigurationError(f"None of these brokers has topic {', '.join(sorted(unknown))}: {', '.join(aliases) or 'none'}.")
    if not recorders:
        raise ConfigurationError("There is nothing to record: the audit reads the brokers' tables and Kafka's topics.")
    return recorders


def _describe(recorder: Recorder) -> str:
    return f"broker {recorder.alias!r} as group {recorder.group!r}, topics {', '.join(recorder.topics)}"


def _catch_signals() -> list[int]:
    """
    Return a list to which signal handlers add SIGTERM and SIGINT. They do nothing else, since they may interrupt any statement.
    """
    caught: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: caught.append(number))
    return caught


def _run_until_signal(recorders: list[Recorder], caught: list[int]) -> None:
    """Record until a signal comes. After an outage of a broker or the database, recording continues."""
    threads = [
        RepeatingThread(f"Recorder of {recorder.alias!r}", recorder.run_once, pause=STAND_BY_SECONDS) for recorder in recorders
    ]
    for thread in threads:
        thread.start()
    while not caught:
        threads[0].join(SIGNAL_CHECK_SECONDS)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join()
