"""
A process that forks others which freeze themselves (SIGSTOP), each before a certain one of its calls to PostgreSQL.

It reads lines `ACT NTH` and answers with a process id: relay, half-first, checker, consumer, publisher or maintenance, frozen
before its call number NTH, or ended where it makes fewer.
"""

import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

import django
import psycopg


def relay() -> None:
    """Relay what waits, maintain, and settle what was left."""
    from outbox.relay import hosts

    hosts.run_once(
        hosts.RelayTarget("default", "default"), note="frozen", at_most=timedelta(seconds=20), idle_timeout=hosts.NO_IDLE_TIMEOUT
    )


def half_first() -> None:
    """Publish a message half first, and end it."""
    import outbox
    from tests.journeys.frozen.messages import FrozenPair, note

    number = -10 * os.getpid()
    with outbox.atomic(half_first=FrozenPair(number=number)):
        note(number - 1)


def checker() -> None:
    """Ask about half messages that nobody ended."""
    from outbox.check_backs.loop import CheckLoop

    CheckLoop("default", "default").turn()


def consumer() -> None:
    """Handle what waits."""
    from outbox.consuming.register import group
    from outbox.consuming.worker import Worker
    from tests.journeys.frozen.settings import GROUP

    Worker(group(GROUP), "default").run(until_idle=True)


def publisher() -> None:
    """Publish two messages of a key, and one without."""
    import outbox
    from tests.journeys.frozen.messages import FrozenParcel

    number = -10 * os.getpid()
    with outbox.atomic():
        outbox.publish_many([FrozenParcel(parcel="frozen", number=number), FrozenParcel(parcel="frozen", number=number - 1)])
        outbox.publish_raw("letters", {"number": number})


def publisher_that_may_not_be_idle() -> None:
    """Publish the same, over a connection whose idle transactions PostgreSQL ends."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SET idle_in_transaction_session_timeout = '1s'")
    publisher()


def maintenance() -> None:
    """Make days, prune, and have the broker prune."""
    from outbox.relay.maintenance import maintain, prune_brokers

    maintain("default")
    prune_brokers(["default"])


ALL = (relay, half_first, checker, consumer, publisher, publisher_that_may_not_be_idle, maintenance)
ACTS = {act.__name__.replace("_", "-"): act for act in ALL}


def _freeze_before(nth: int) -> None:
    """Stop this process before it waits for PostgreSQL for that time."""
    calls = 0
    wait = psycopg.Connection.wait

    def count_and_wait(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGSTOP)
        return wait(self, *arguments, **named)

    psycopg.Connection.wait = count_and_wait  # type: ignore[method-assign]


def main() -> None:
    """Serve until the input ends."""
    django.setup()
    from tests.journeys.frozen.messages import register

    register()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is gone
    for line in sys.stdin:
        act, nth = line.split()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _freeze_before(int(nth))
            with suppress(psycopg.Error):
                ACTS[act]()
            os._exit(0)
        print(pid, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
