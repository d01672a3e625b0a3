"""Hand messages to the project's consumers, resident or until nothing waits."""

from __future__ import annotations

import json
import logging
import signal
import time
from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand
from django.db import Error as DatabaseError
from django.db import InterfaceError, OperationalError, connections

from outbox import conf, database
from outbox.consuming.gaps import find_gaps
from outbox.consuming.register import Group, group, groups
from outbox.consuming.threads import ConsumerThreads
from outbox.database import heartbeats
from outbox.errors import BrokerUnavailable, ConfigurationError, OutboxError
from outbox.management.exits import unable
from outbox.management.greeting import greet

logger = logging.getLogger(__name__)

BEAT_SECONDS = 10.0
SIGNAL_SECONDS = 0.2  # so long a signal may go unnoticed


class Command(BaseCommand):
    help = (
        "Receive messages for consumer groups and apply each one once. Ends cleanly on SIGTERM and SIGINT: the message "
        "being handled is finished, the rest handed back. Exit code: 0 ended as told, 1 it failed, 2 it cannot begin, or "
        "database or broker stay away with --once or --until-idle."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--group", action="append", metavar="NAME", help="may be repeated (default: all groups)")
        parser.add_argument("--threads", type=_count, default=1, metavar="N", help="for each group and broker (default: 1)")
        parser.add_argument("--until-idle", action="store_true", help="end when nothing waits any more")
        parser.add_argument("--once", action="store_true", help="end after one batch for each group")
        parser.add_argument("--json", action="store_true", help="print the summary as one line of JSON")

    def handle(self, **options: Any) -> None:
        try:
            chosen = _choose(options["group"])
            crew = ConsumerThreads(chosen, threads=options["threads"])
        except OutboxError as error:
            raise unable(error) from error
        greet(self, options, f"Consuming {'; '.join(map(_describe, chosen))}.")
        caught: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            # Only noted: a handler runs in the middle of anything, where setting an Event may wait for itself.
            signal.signal(number, lambda number, _: caught.append(number))
        crew.start(until_idle=options["until_idle"], once=options["once"])
        _keep_house(crew, chosen, caught)
        try:
            crew.join()
        except (BrokerUnavailable, DatabaseError) as error:
            raise unable(error) from error
        self._report(crew, as_json=options["json"])

    def _report(self, crew: ConsumerThreads, *, as_json: bool) -> None:
        summary = {name: asdict(tally) for name, tally in crew.tally().items()}
        if as_json:
            self.stdout.write(json.dumps(summary))
            return
        for name, counts in summary.items():
            said = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items() if count)
            self.stdout.write(f"{name}: {said or 'nothing came'}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no count, 1 or more")
    return int(text)


def _choose(names: list[str] | None) -> list[Group]:
    if names:
        return [group(name) for name in names]
    if not groups():
        raise ConfigurationError("No @consumer is defined. Put one into the consumers.py of an installed app.")
    return list(groups().values())


def _describe(one: Group) -> str:
    return f"group {one.name!r}, topics {', '.join(sorted(one.topics))}"


def _keep_house(crew: ConsumerThreads, chosen: list[Group], caught: list[int]) -> None:
    """While the crew works, say that it lives and look for gaps; stop it when a signal was caught."""
    settle_seconds = conf.settings().consumer.settle.total_seconds()
    beat_at, look_at = 0.0, time.monotonic() + settle_seconds
    while crew.is_working():
        if caught:
            crew.stop()
        if time.monotonic() >= beat_at:
            _guarded(_beat, crew)
            beat_at = time.monotonic() + BEAT_SECONDS
        if time.monotonic() >= look_at:
            for one in chosen:
                _guarded(find_gaps, one)
            look_at = time.monotonic() + settle_seconds
        crew.wait(SIGNAL_SECONDS)
    _guarded(_leave, crew)


def _guarded(step: Any, subject: object) -> None:
    """Do a chore; the consumers work on without it, and it is tried again."""
    try:
        step(subject)
    except (OperationalError, InterfaceError) as error:
        logger.warning("A chore beside the consumers waits for the database: %s", str(error).strip())
        connections.close_all()
    except Exception:
        logger.exception("A chore beside the consumers failed; it is done again soon.")
        connections.close_all()


def _beat(crew: ConsumerThreads) -> None:
    for using, alias, name in crew.posts():
        heartbeats.beat(database.raw(using), "consumer", broker=alias, consumer_group=name)


def _leave(crew: ConsumerThreads) -> None:
    for using, alias, name in crew.posts():
        heartbeats.leave(database.raw(using), "consumer", broker=alias, consumer_group=name)
