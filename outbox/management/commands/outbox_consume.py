"""Hand messages to the project's consumers, resident or until nothing waits."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import psycopg
from django.core.management.base import BaseCommand
from django.db import Error as DatabaseError
from django.db import connections

from outbox import conf, database
from outbox.consuming import wants
from outbox.consuming.gaps import find_gaps
from outbox.consuming.register import Group, group, groups
from outbox.consuming.threads import ConsumerThreads
from outbox.database import heartbeats
from outbox.ending import Ending
from outbox.errors import ConfigurationError, OutboxError
from outbox.logs import get_logger
from outbox.management.exits import ENDED_UNFINISHED, unable
from outbox.management.greeting import greet
from outbox.relay.resident import Resident

logger = get_logger(__name__)

T = TypeVar("T")


class Command(BaseCommand):
    help = (
        "Receive messages for consumer groups and apply each one once. Ends cleanly on SIGTERM and SIGINT, within 5 s of the "
        "last handler's return: the message being handled is finished, the rest handed back. A second signal, when handlers "
        "take longer, ends it at once. Exit code: 0 ended as told, 1 it failed, 2 it cannot begin, or database or broker stay "
        f"away with --once or --until-idle, {ENDED_UNFINISHED}."
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
        with Ending(crew.threads) as ending:
            crew.start(until_idle=options["until_idle"], once=options["once"])
            beside = _beside(crew, chosen)
            for resident in beside:
                resident.start()
            ending.wait(crew.is_working)
            crew.stop()
            for resident in beside:
                resident.stop()
            try:
                crew.join()
            except (OutboxError, DatabaseError, psycopg.Error) as error:
                raise unable(error) from error
            finally:
                _leave(crew)
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
    return f"group {one.name!r}, topics {', '.join(one.topics)}"


def _beside(crew: ConsumerThreads, chosen: list[Group]) -> list[Resident]:
    """Make what works beside the consumers: says that they live, and looks for gaps. They work on without it."""
    settle_seconds = conf.settings().consumer.settle.total_seconds()
    return [
        Resident("Heartbeat of consumers", partial(_again, _beat, crew), pause=heartbeats.BEAT_SECONDS),
        Resident("Look for gaps", partial(_again, _look, chosen), pause=settle_seconds, begins_after=settle_seconds),
    ]


def _again(step: Callable[[T], object], subject: T) -> bool:
    """Do a chore on Django's connections, which are opened anew after a failure."""
    try:
        step(subject)
    except BaseException:
        connections.close_all()
        raise
    return False


def _look(chosen: list[Group]) -> None:
    for one in chosen:
        find_gaps(one)


def _beat(crew: ConsumerThreads) -> None:
    for using, alias, name in crew.posts():
        database.ensure_fit(using, database.raw(using))
        wants.beat(group(name), alias)


def _leave(crew: ConsumerThreads) -> None:
    """Take the heartbeats away; where a database is away, they stay until they are stale."""
    try:
        for using, alias, name in crew.posts():
            heartbeats.leave(database.raw(using), "consumer", broker=alias, consumer_group=name)
    except psycopg.errors.UndefinedTable:  # they never had one
        connections.close_all()
    except (DatabaseError, psycopg.Error) as error:
        logger.warning("The heartbeat of the consumers stays: %s", str(error).strip())
        connections.close_all()
