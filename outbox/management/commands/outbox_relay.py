"""The long-running relay, which moves messages from their rows to the broker."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from typing import Any

import psycopg
from django.core.management.base import BaseCommand, CommandError
from msgspec.structs import asdict

from outbox.check_backs.ask import in_process
from outbox.check_backs.loop import Checker, CheckLoop, brokers_that_ask, brokers_to_ask_for
from outbox.consuming.deferred_housekeeping import HOUSEKEEPING_INTERVAL, tidy
from outbox.database.heartbeats import BEAT_SECONDS
from outbox.errors import OutboxError
from outbox.management.exits import ENDED_UNFINISHED, unable
from outbox.management.greeting import greet
from outbox.relay import hosts
from outbox.relay.loops import RelayThread, RepeatingThread, run_until_stopped
from outbox.relay.maintenance import MAINTENANCE_INTERVAL, maintain, prune_brokers
from outbox.relay.rounds import RelayResult
from outbox.shutdown import GracefulShutdown

CHECK_INTERVAL_SECONDS = 1.0


class Command(BaseCommand):
    help = (
        "Relay messages as they are committed: one thread for each database and broker. Ends cleanly on SIGTERM and "
        "SIGINT, within 5 s: the current batch is finished, the others are released. You can start any number of relays; they "
        "share the work. Exit code: 0 stopped by a signal or by an option, 1 failed, or --once has left messages unsent, "
        f"2 could not start, {ENDED_UNFINISHED}."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--database", action="append", metavar="ALIAS", help="may be repeated (default: all)")
        parser.add_argument("--broker", action="append", metavar="ALIAS", help="may be repeated (default: all)")
        parser.add_argument("--once", action="store_true", help="relay the messages that wait now, then end")
        parser.add_argument(
            "--take-over",
            action="store_true",
            help="for a broker that sends in transactions: take its lanes over from another database, which this one replaces",
        )
        parser.add_argument("--json", action="store_true", help="print the summary as one line of JSON")

    def handle(self, **options: Any) -> None:
        try:
            targets = hosts.relay_targets(options["database"], options["broker"])
            if not targets:
                raise unable('No relay is needed, since OUTBOX["TOPICS"] is empty, or no database may hold messages.')
            hosts.require_sessions(target.database for target in targets)
            greet(self, options, f"Relaying {'; '.join(map(str, targets))}.")
            done = (_run_once if options["once"] else _run)(targets, takes_over=options["take_over"])
        except (OutboxError, psycopg.OperationalError) as error:
            raise unable(error) from error
        self._report(done, as_json=options["json"])
        if options["once"] and any(result.unaccepted for result in done.values()):
            raise SystemExit(1)

    def _report(self, done: dict[hosts.RelayTarget, RelayResult], *, as_json: bool) -> None:
        if as_json:
            self.stdout.write(json.dumps({"relays": [asdict(target) | asdict(result) for target, result in done.items()]}))
            return
        for target, result in done.items():
            batches = f"{result.batches} batch{'' if result.batches == 1 else 'es'}"
            self.stdout.write(f"{target}: {result.sent} sent in {batches}, {result.unaccepted} to be retried or dead")


def _run_once(targets: list[hosts.RelayTarget], *, takes_over: bool) -> dict[hosts.RelayTarget, RelayResult]:
    done = {}
    for target in targets:
        with hosts.open_runner(target, note="once", takes_over=takes_over) as runner:
            done[target] = runner.run(idle_timeout=hosts.NO_IDLE_TIMEOUT)
            runner.deregister()
    return done


def _run(targets: list[hosts.RelayTarget], *, takes_over: bool) -> dict[hosts.RelayTarget, RelayResult]:
    """
    Run relays, check-backs and maintenance until a signal arrives.

    Raises:
        CommandError: a thread ended without a signal.
    """
    relays = [RelayThread(target, takes_over=takes_over) for target in targets]
    threads = [*relays, *_side_threads(targets)]
    with GracefulShutdown(relays) as shutdown:
        is_signalled = run_until_stopped(threads, shutdown)
        for relay in relays:
            relay.join()
    if not is_signalled:
        raise CommandError("A relay ended without a signal; the log says why.")
    return {relay.target: relay.total for relay in relays}


def _side_threads(targets: list[hosts.RelayTarget]) -> Iterator[RepeatingThread]:
    """Yield the threads that run beside the relays: check-back loops, checkers, and maintenance."""
    brokers, using = {target.broker for target in targets}, targets[0].database
    for alias in brokers_to_ask_for(brokers):
        yield RepeatingThread(f"Check loop of broker {alias!r}", CheckLoop(alias, using).turn, pause=CHECK_INTERVAL_SECONDS)
    for alias in brokers_that_ask(brokers):
        checker = Checker(alias, using, in_process(using))
        yield RepeatingThread(f"Checker of broker {alias!r}", checker.turn, pause=BEAT_SECONDS)
    for alias in sorted({target.database for target in targets}):
        yield RepeatingThread(f"Maintenance of database {alias!r}", partial(maintain, alias), pause=MAINTENANCE_INTERVAL)
        yield RepeatingThread(f"Housekeeping of database {alias!r}", partial(tidy, alias), pause=HOUSEKEEPING_INTERVAL)
    yield RepeatingThread("Maintenance of brokers", partial(prune_brokers, brokers), pause=MAINTENANCE_INTERVAL)
