"""
Processes that are frozen, as a paused machine is: each is stopped before each of its calls to PostgreSQL, and others go on.

A relay, a checker, a request that goes half first: within LEASE and 2 s. A consumer: within INVISIBLE and 2 s. Both are 1 s here.
"""

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

import outbox
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.models import MessageState
from outbox.relay import hosts
from tests.database_url import environment_of
from tests.journeys.frozen import settings as frozen
from tests.journeys.frozen.messages import FrozenPair, FrozenParcel
from tests.journeys.tables import rows
from tests.waiting import wait_until

MARKS = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300), pytest.mark.slow]

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
        environment = environment_of("tests.journeys.frozen.settings")
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
    """Relay what waits, as a long-running relay does, which outlasts its database's errors; return whether all is sent."""
    with suppress(psycopg.OperationalError):
        hosts.run_once(TARGET, note="another", at_most=timedelta(seconds=2), idle_timeout=hosts.NO_IDLE_TIMEOUT)
    return not MessageState.objects.exclude(state="sent").exists()


def consume() -> set[int]:
    """Handle what waits; return the numbers that were written down, each once."""
    with closing(Worker(group(frozen.GROUP), "default")) as worker:
        worker.run(once=True)
    found = [number for (number,) in rows("SELECT number FROM journey_frozen")]
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
