"""
Processes that are frozen, as a paused machine is: each is stopped before each of its calls to PostgreSQL, and others go on.

A relay, a checker, a request that goes half first: within LEASE and 2 s. A consumer: within INVISIBLE and 2 s. Both are 1 s here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection

import outbox
from outbox.check_backs.loop import CheckLoop
from outbox.consuming import register as consumers
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.database.partitions import make_days
from outbox.half_first.producers import close_idle
from outbox.models import MessageState
from outbox.relay import hosts
from outbox.topics import forget
from tests.database_url import url_of
from tests.journeys.frozen import settings as frozen
from tests.journeys.frozen.messages import FrozenPair, FrozenParcel, note, register
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300), pytest.mark.slow]

SECONDS = 3.0
LAST_DAY = """
SELECT max(c.relname) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = 'outbox_message'::regclass AND c.relname <> 'outbox_message_default'
"""
PARTS = 4  # of the places where a process can be frozen, each in a test of its own
TARGET = hosts.RelayTarget("default", "default")


class Actor:
    """Starts processes that freeze themselves."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "DATABASE_URL": url_of(connection.settings_dict),
            "DJANGO_SETTINGS_MODULE": "tests.journeys.frozen.settings",
        }
        command = [sys.executable, "-m", "tests.journeys.frozen.actor"]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.pids: list[int] = []

    def freeze(self, act: str, nth: int) -> bool:
        """Start a process that freezes before that call; return whether it did, and did not end before."""
        assert self.process.stdin
        assert self.process.stdout
        print(act, nth, file=self.process.stdin, flush=True)
        pid = int(self.process.stdout.readline())
        self.pids.append(pid)
        return wait_until(lambda: _state(pid) in ("T", None) and (_state(pid) or "gone")) == "T"

    def kill(self) -> None:
        """End what is frozen."""
        while self.pids:
            pid = self.pids.pop()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: _state(pid) is None)

    def close(self) -> None:
        """End all of it."""
        self.kill()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def _state(pid: int) -> str | None:
    """Return how the kernel says that a process stands; T: stopped. None: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


@pytest.fixture
def actor(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Actor]:
    settings.OUTBOX = frozen.OUTBOX
    monkeypatch.setattr(consumers, "registered", {})
    register()
    forget("default")
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS journey_frozen")
        cursor.execute("CREATE TABLE journey_frozen (number int)")
    found = Actor()
    yield found
    found.close()
    close_idle()
    forget("default")
    with connection.cursor() as cursor:
        cursor.execute("DROP TABLE journey_frozen")


def publish(numbers: Iterator[int]) -> set[int]:
    """Publish messages of each type; return the numbers of those that consumers write down."""
    with outbox.atomic():
        outbox.publish_raw("letters", {"number": next(numbers)})
        outbox.publish_raw("alarms", {"number": next(numbers)}, delay=timedelta(milliseconds=1))
        sent = [FrozenPair(number=next(numbers)), FrozenPair(number=next(numbers))]
        sent += [FrozenParcel(parcel=key, number=next(numbers)) for key in "aba"]
        outbox.publish_many(sent)
    return {message.number for message in sent}


def relay() -> bool:
    """Relay what waits, as a resident does that outlasts its database's errors; return whether all is sent."""
    with suppress(psycopg.OperationalError):
        hosts.run_once(TARGET, note="another", at_most=timedelta(seconds=2), idle_timeout=hosts.NO_IDLE_TIMEOUT)
    return not MessageState.objects.exclude(state="sent").exists()


def consume() -> set[int]:
    """Handle what waits; return the numbers that were written down, each once."""
    with closing(Worker(group(frozen.GROUP), "default")) as worker:
        worker.run(once=True)
    with connection.cursor() as cursor:
        found = [number for (number,) in cursor.execute("SELECT number FROM journey_frozen").fetchall()]
    assert len(found) == len(set(found))
    return set(found)


def each_place(actor: Actor, act: str, part: int, prepare: Callable[[], Any], go_on: Callable[[Any], bool]) -> list[float]:
    """
    Freeze a process at each of its places and have others go on.

    Args:
        prepare: lays the work out; `go_on` gets what it returns.
        go_on: does what others do once more; returns whether all is done.

    Returns:
        The seconds that the others took, place by place.
    """
    found = []
    for nth in count(1 + part, PARTS):
        work = prepare()
        is_frozen = actor.freeze(act, nth)
        began = time.monotonic()
        try:
            wait_until(lambda work=work: go_on(work), SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{act} frozen before call {nth}: others do not go on within {SECONDS} s") from error
        found.append(round(time.monotonic() - began, 2))
        actor.kill()
        if not is_frozen:
            break
    print(act, part, found)  # noqa: T201
    return found


@pytest.mark.parametrize("part", range(PARTS))
class TestAFrozen:
    def test_relay_stops_no_other_relay(self, actor, part):
        numbers = count()

        places = each_place(actor, "relay", part, lambda: publish(numbers), lambda _: relay())

        assert len(places) > 5

    def test_consumer_stops_no_other_consumer(self, actor, part):
        numbers = count()

        def prepare():
            sent = publish(numbers)
            wait_until(relay)
            return sent

        places = each_place(actor, "consumer", part, prepare, lambda sent: sent <= consume())

        assert len(places) > 5

    def test_request_that_goes_half_first_stops_nobody(self, actor, part):
        numbers = count()

        def prepare():
            with closing(CheckLoop("default", "default")) as loop:
                loop.turn()

        def go_on(_):
            number = next(numbers)
            with outbox.atomic(half_first=FrozenPair(number=number)):
                note(number + 1000)
            prepare()
            relay()
            return number in consume()

        assert each_place(actor, "half-first", part, lambda: None, go_on)

    def test_check_loop_stops_no_other(self, actor, part):
        numbers = count()

        def prepare():
            sent = publish(numbers)
            assert actor.freeze("half-first", 8)
            actor.kill()
            return sent

        def go_on(sent):
            with closing(CheckLoop("default", "default")) as loop:
                loop.turn()
            relay()
            with connection.cursor() as cursor:
                (open_halves,) = cursor.execute("SELECT count(*) FROM outbox_embedded_half WHERE state = 0").fetchone()
            return sent <= consume() and not open_halves

        assert each_place(actor, "checker", part, prepare, go_on)

    def test_maintenance_stops_nobody(self, actor, part):
        numbers = count()

        def prepare():
            make_days("default")
            with connection.cursor() as cursor:
                (day,) = cursor.execute(LAST_DAY).fetchone()
                cursor.execute(f'DROP TABLE "{day}"')

        def go_on(_):
            publish(numbers)
            return relay()

        assert each_place(actor, "maintenance", part, prepare, go_on)

    def test_publisher_stops_only_publishers_of_its_key(self, actor, part):
        numbers = count()

        def go_on(sent):
            with outbox.atomic():
                outbox.publish(FrozenParcel(parcel="another", number=next(numbers)))
            return relay()

        assert each_place(actor, "publisher", part, lambda: publish(numbers), go_on)

    def test_publisher_stops_those_of_its_key_as_long_as_its_database_allows(self, actor, part):
        numbers = count()

        def go_on(sent):
            with outbox.atomic():
                outbox.publish(FrozenParcel(parcel="frozen", number=next(numbers)))
            return relay()

        assert each_place(actor, "publisher-that-may-not-be-idle", part, lambda: publish(numbers), go_on)
