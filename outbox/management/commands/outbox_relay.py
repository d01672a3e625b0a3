"""The resident relay."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import psycopg
from django.core.management.base import BaseCommand, CommandError

from outbox.check_backs.ask import in_process
from outbox.check_backs.checker import Checker, brokers_that_ask
from outbox.check_backs.loop import CheckLoop, brokers_to_ask_for
from outbox.database.heartbeats import BEAT_SECONDS
from outbox.ending import Ending
from outbox.errors import OutboxError
from outbox.management.exits import ENDED_UNFINISHED, unable
from outbox.management.greeting import greet
from outbox.relay import hosts
from outbox.relay.maintenance import MAINTENANCE_INTERVAL, maintain, prune_brokers
from outbox.relay.resident import Resident, ResidentRelay, run_until_asked
from outbox.relay.rounds import RelayResult

CHECK_EVERY = 1.0  # seconds


class Command(BaseCommand):
    help = (
        "Relay messages as they are committed: one thread for each database and broker. Ends cleanly on SIGTERM and "
        "SIGINT, within 5 s: the batch under way is finished, the rest released. Start it as often as you like; relays share "
        f"the work. Exit code: 0 ended as told, 1 it ended by itself, 2 it cannot begin, {ENDED_UNFINISHED}."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", action="append", metavar="ALIAS", help="may be repeated (default: all)")
        parser.add_argument("--broker", action="append", metavar="ALIAS", help="may be repeated (default: all)")
        parser.add_argument("--once", action="store_true", help="relay what waits now, then end")
        parser.add_argument("--json", action="store_true", help="print the summary as one line of JSON")

    def handle(self, **options: Any) -> None:
        try:
            posts = hosts.relay_targets(options["database"], options["broker"])
            if not posts:
                raise unable('No relay is needed: OUTBOX["TOPICS"] is empty, or no database may hold messages.')
            hosts.require_sessions(post.database for post in posts)
            greet(self, options, f"Relaying {'; '.join(map(str, posts))}.")
            done = _visit(posts) if options["once"] else _stay(posts)
        except (OutboxError, psycopg.OperationalError) as error:
            raise unable(error) from error
        self._report(done, as_json=options["json"])

    def _report(self, done: dict[hosts.RelayTarget, RelayResult], *, as_json: bool) -> None:
        if as_json:
            self.stdout.write(json.dumps({"relays": [asdict(post) | asdict(drained) for post, drained in done.items()]}))
            return
        for post, drained in done.items():
            self.stdout.write(
                f"{post}: {drained.sent} sent in {drained.batches} batches, {drained.unaccepted} to be tried again or dead"
            )


def _visit(posts: list[hosts.RelayTarget]) -> dict[hosts.RelayTarget, RelayResult]:
    done = {}
    for post in posts:
        with hosts.open_runner(post, note="once") as runner:
            done[post] = runner.run(idle_timeout=hosts.NO_IDLE_TIMEOUT)
            runner.deregister()
    return done


def _stay(posts: list[hosts.RelayTarget]) -> dict[hosts.RelayTarget, RelayResult]:
    """
    Keep relays at their posts, and beside them what they need, until a signal comes.

    Raises:
        CommandError: a thread ended by itself.
    """
    relays = [ResidentRelay(post) for post in posts]
    residents = [*relays, *_check_loops(posts), *_checkers(posts), *_upkeep(posts)]
    with Ending(relays) as ending:
        is_asked = run_until_asked(residents, ending)
        for relay in relays:
            relay.join()
    if not is_asked:
        raise CommandError("A relay ended by itself; the log says why.")
    return {relay.post: relay.total for relay in relays}


def _check_loops(posts: list[hosts.RelayTarget]) -> Iterator[Resident]:
    for alias in brokers_to_ask_for({post.broker for post in posts}):
        loop = CheckLoop(alias, posts[0].database)
        yield Resident(f"Check loop of broker {alias!r}", loop.turn, pause=CHECK_EVERY)


def _checkers(posts: list[hosts.RelayTarget]) -> Iterator[Resident]:
    for alias in brokers_that_ask({post.broker for post in posts}):
        checker = Checker(alias, posts[0].database, in_process(posts[0].database))
        yield Resident(f"Checker of broker {alias!r}", checker.turn, pause=BEAT_SECONDS)


def _upkeep(posts: list[hosts.RelayTarget]) -> Iterator[Resident]:
    for alias in sorted({post.database for post in posts}):
        yield Resident(f"Maintenance of database {alias!r}", partial(_without_more, maintain, alias), pause=MAINTENANCE_INTERVAL)
    brokers = {post.broker for post in posts}
    yield Resident("Maintenance of brokers", partial(_without_more, prune_brokers, brokers), pause=MAINTENANCE_INTERVAL)


def _without_more(step: Callable[[Any], object], subject: Any) -> bool:
    step(subject)
    return False
