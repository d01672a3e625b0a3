"""The long-running checker. It answers check-backs: a broker asks whether the transaction of a half message committed."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from outbox import conf
from outbox.check_backs.ask import in_process, log_sent
from outbox.check_backs.loop import Checker, brokers_that_ask, make_asker
from outbox.database.heartbeats import BEAT_SECONDS
from outbox.errors import OutboxError
from outbox.management.exits import ENDED_UNFINISHED, unable
from outbox.management.greeting import greet
from outbox.relay import hosts
from outbox.relay.loops import RepeatingThread, run_until_stopped
from outbox.shutdown import GracefulShutdown


class Command(BaseCommand):
    help = (
        "Answer the check-backs of brokers that ask producers. Every relay does this too; use this command if no relay runs "
        "all the time. You can start any number of checkers; they share the questions. Ends cleanly on SIGTERM and SIGINT, "
        f"within 5 s. Exit code: 0 stopped by a signal, 1 failed, 2 could not start, {ENDED_UNFINISHED}."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--broker", action="append", metavar="ALIAS", help="may be repeated (default: all that ask)")
        parser.add_argument("--database", metavar="ALIAS", help="database for half messages without a token (default: the first)")
        parser.add_argument(
            "--over-http", action="store_true", help='ask the endpoint OUTBOX["CHECK_BACK"]["URL"], for hosts without a database'
        )

    def handle(self, **options: Any) -> None:
        try:
            using = hosts.databases([options["database"]] if options["database"] else None)[0]
            aliases = brokers_that_ask(set(options["broker"] or conf.settings().brokers))
            if not aliases:
                raise unable(
                    "None of the brokers sends check-backs to producers. For other brokers, every relay asks and answers."
                )
            is_over_http = options["over_http"]
            ask, on_other_answer = (make_asker(using), log_sent) if is_over_http else (in_process(using), None)
        except OutboxError as error:
            raise unable(error) from error
        greet(self, options, f"Answering check-backs of broker {', '.join(map(repr, aliases))}.")
        _run([Checker(alias, using, ask, on_other_answer=on_other_answer) for alias in aliases])


def _run(checkers: list[Checker]) -> None:
    """
    Run checkers until a signal arrives.

    Raises:
        CommandError: a thread ended without a signal.
    """
    threads = [RepeatingThread(f"Checker of broker {checker.alias!r}", checker.turn, pause=BEAT_SECONDS) for checker in checkers]
    with GracefulShutdown(threads) as shutdown:
        is_signalled = run_until_stopped(threads, shutdown)
        for thread in threads:
            thread.join()
        for checker in checkers:
            checker.close()
    if not is_signalled:
        raise CommandError("A checker ended without a signal; the log says why.")
