"""Run the project's consumers, until stopped or until no message waits."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import psycopg
from django.core.management.base import BaseCommand
from django.db import Error as DatabaseError
from django.db import connections
from msgspec.structs import asdict

from outbox import conf, database
from outbox.consuming import subscriptions
from outbox.consuming.gaps import find_gaps
from outbox.consuming.owners import take_over
from outbox.consuming.register import Group, group, groups
from outbox.consuming.worker import ConsumerThreads
from outbox.database import heartbeats
from outbox.database.loop_errors import Loop, recording
from outbox.errors import ConfigurationError, OutboxError
from outbox.logs import get_logger
from outbox.management.exits import ENDED_UNFINISHED, unable
from outbox.management.greeting import greet
from outbox.relay.loops import RepeatingThread
from outbox.shutdown import GracefulShutdown

logger = get_logger(__name__)

T = TypeVar("T")

SIDE_THREAD_SECONDS = 1.0  # a thread that waits for longer, for a database that does not answer, is left alone


class Command(BaseCommand):
    help = (
        "Receive messages for consumer groups and handle each one once. Ends cleanly on SIGTERM and SIGINT, within 5 s after the "
        "last handler returns: the current message is finished, the others are deferred. A second signal ends it at once. "
        "Exit code: 0 stopped by a signal or by an option, 1 failed, 2 could not start, or with --once or --until-idle, "
        f"a database or broker cannot be reached, {ENDED_UNFINISHED}."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--group", action="append", metavar="NAME", help="may be repeated (default: all groups)")
        parser.add_argument("--threads", type=_count, default=1, metavar="N", help="for each group and broker (default: 1)")
        parser.add_argument("--until-idle", action="store_true", help="end when no more messages wait")
        parser.add_argument("--once", action="store_true", help="end after one receive for each group and broker")
        parser.add_argument(
            "--take-over", action="store_true", help="make this database the owner of the groups, and end; needs --group"
        )
        parser.add_argument("--json", action="store_true", help="print the summary as one line of JSON")

    def handle(self, **options: Any) -> None:
        if options["take_over"] and not options["group"]:
            raise unable("--take-over needs --group: name the groups that another database owns, which this one replaces.")
        try:
            chosen = _choose(options["group"])
            if options["take_over"]:
                take_over(chosen)
                self.stdout.write(f"{', '.join(group.name for group in chosen)}: taken over. Start the consumers.")
                return
            consumers = ConsumerThreads(chosen, threads=options["threads"])
        except (OutboxError, DatabaseError, psycopg.Error) as error:
            raise unable(error) from error
        greet(self, options, f"Consuming {'; '.join(map(_describe, chosen))}.")
        with GracefulShutdown(consumers.threads) as shutdown:
            consumers.start(until_idle=options["until_idle"], once=options["once"])
            side_threads = _side_threads(consumers, chosen)
            for thread in side_threads:
                thread.start()
            shutdown.wait(consumers.is_working)
            consumers.stop()
            for thread in side_threads:
                thread.stop()
            try:
                consumers.join()
            except (OutboxError, DatabaseError, psycopg.Error) as error:
                raise unable(error) from error
            finally:
                for thread in side_threads:  # so that none sends a heartbeat after they are deleted, or leaves a connection open
                    thread.join(SIDE_THREAD_SECONDS)
                _delete_heartbeats(consumers)
        self._report(consumers, as_json=options["json"])

    def _report(self, consumers: ConsumerThreads, *, as_json: bool) -> None:
        summary = {name: asdict(counts) for name, counts in consumers.counts().items()}
        if as_json:
            self.stdout.write(json.dumps(summary))
            return
        for name, numbers in summary.items():
            text = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in numbers.items() if count)
            self.stdout.write(f"{name}: {text or 'no messages'}")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _choose(names: list[str] | None) -> list[Group]:
    if names:
        return [group(name) for name in names]
    if not groups():
        raise ConfigurationError("No @consumer is defined.", hint="Define one in consumers.py of an installed app.")
    return list(groups().values())


def _describe(chosen_group: Group) -> str:
    return f"group {chosen_group.name!r}, topics {', '.join(chosen_group.topics)}"


def _side_threads(consumers: ConsumerThreads, chosen: list[Group]) -> list[RepeatingThread]:
    """Return the threads that send heartbeats and search for gaps. If one fails, consumers continue."""
    settle_seconds = conf.settings().consumer.settle.total_seconds()
    return [
        RepeatingThread(
            "Heartbeat of consumers", partial(_with_new_connections, _send_heartbeats, consumers), pause=heartbeats.BEAT_SECONDS
        ),
        RepeatingThread(
            "Look for gaps", partial(_with_new_connections, _find_gaps, chosen), pause=settle_seconds, begins_after=settle_seconds
        ),
    ]


def _with_new_connections(step: Callable[[T], object], subject: T) -> None:
    """Run a step over Django's connections. After an error, close them, so that the next step opens new ones."""
    try:
        step(subject)
    except BaseException:
        connections.close_all()
        raise


def _find_gaps(chosen: list[Group]) -> None:
    for chosen_group in chosen:
        with recording(Loop("search for gaps", chosen_group.using, group=chosen_group.name)):
            find_gaps(chosen_group)


def _send_heartbeats(consumers: ConsumerThreads) -> None:
    for using, alias, name in consumers.targets():
        database.ensure_fit(using, database.raw(using))
        subscriptions.beat(group(name), alias)


def _delete_heartbeats(consumers: ConsumerThreads) -> None:
    """Delete the heartbeats. In a database that cannot be reached, they stay until they are stale."""
    try:
        for using, alias, name in consumers.targets():
            heartbeats.delete_heartbeat(database.raw(using), "consumer", broker=alias, consumer_group=name)
    except psycopg.errors.UndefinedTable:  # there are no tables, so no heartbeat was stored
        connections.close_all()
    except (DatabaseError, psycopg.Error) as error:
        logger.warning("The heartbeats of the consumers could not be deleted: %s", str(error).strip())
        connections.close_all()
