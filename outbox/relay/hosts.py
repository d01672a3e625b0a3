"""
What both hosts of a relay share: a Celery task runs one for a while, the resident command until it is stopped.

A target is one database and one broker. All that a relay needs is opened with its runner and closed with it; a database
that goes away in between ends the run with psycopg's error, and loses nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import psycopg
from django.db import connections

from outbox import conf, database
from outbox.brokers.base import Broker
from outbox.database import Connection, heartbeats
from outbox.ending import Watch
from outbox.errors import ConfigurationError
from outbox.logs import get_logger
from outbox.relay.breaker import Breakers, BreakerState
from outbox.relay.delayed import MOVED_AT_ONCE, move_due
from outbox.relay.lane import Lane, take_lane
from outbox.relay.rounds import Relay, RelayResult, make_breakers
from outbox.relay.wakeup import Waker, forget_dead
from outbox.topics import match_topics

logger = get_logger(__name__)

MAINTENANCE_EVERY = 1.0  # seconds
MANY = 16  # messages in a round: a relay that has so many is busy, and nobody need wake it
FEW_TOPICS = 4  # with new messages: each is looked at by itself
MATCH_TOPICS_EVERY = 5.0
# Each statement here is served by an index, and its tables fill and empty in seconds: what statistics say of them is old. So it
# is planned once, by its shape alone; planning it each time costs more than running it.
STATEMENTS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off"}
# An idle relay looks again so soon, then less and less often, though nobody wakes it.
IDLE_WAITS = {"shortest": timedelta(milliseconds=20), "longest": timedelta(seconds=1)}
IDLE_TIMEOUT = timedelta(milliseconds=200)
NO_IDLE_TIMEOUT = timedelta(0)


@dataclass(frozen=True, slots=True)
class RelayTarget:
    """Where a relay works: a database (Django's alias) and a broker (its alias in `OUTBOX["BROKERS"]`)."""

    database: str
    broker: str

    def __str__(self) -> str:
        return f"database {self.database!r}, broker {self.broker!r}"


def databases(only: Sequence[str] | None = None) -> list[str]:
    """
    List the databases that may hold messages, or those of them that were chosen.

    Raises:
        ConfigurationError: one of `only` is not in settings.
    """
    _require_known("database", only or (), list(connections))
    return list(only) if only else database.outbox_databases()


def relay_targets(only_databases: Sequence[str] | None = None, only_brokers: Sequence[str] | None = None) -> list[RelayTarget]:
    """
    List where relays are needed: each database that may hold messages, with each broker that has topics.

    Raises:
        ConfigurationError: one of `only_...` is not in settings.
    """
    brokers = sorted(conf.settings().brokers)
    _require_known("broker", only_brokers or (), brokers)
    chosen = [broker for broker in only_brokers or brokers if conf.topics_of(broker)]
    return [RelayTarget(database, broker) for database in databases(only_databases) for broker in chosen]


def _require_known(kind: str, given: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [alias for alias in given if alias not in known]:
        raise ConfigurationError(f"There is no {kind} {', '.join(map(repr, unknown))} in settings, but {', '.join(known)}.")


class RelayRunner:
    """
    A relay of a target, in the thread that made it.

    Args:
        connection: the relay's; it holds the lane.
        note: who hosts it, for people.
    """

    def __init__(
        self, target: RelayTarget, connection: Connection, broker: Broker, lane: Lane, note: str, stack: ExitStack
    ) -> None:
        self.target = target
        self.relay = Relay(connection, broker, lane, breakers=_breakers_of(target))
        self.stopped = threading.Event()
        self._connection = connection
        self._note = note
        self._stack = stack
        self._waker: Waker | None = None
        self._is_resident = True
        self._maintenance_at = 0.0

    def run(self, *, at_most: timedelta | None = None, idle_timeout: timedelta | None = None) -> RelayResult:
        """
        Relay until `stop` is called or time is over.

        Args:
            idle_timeout: come to an end when nothing has come for that long; at once if another relay waits for publishers
                already. None: stay.

        Raises:
            psycopg.Error: the database failed.
        """
        self._is_resident = idle_timeout is None
        ends_at = time.monotonic() + at_most.total_seconds() if at_most else float("inf")
        idle_since: float | None = None
        new: frozenset[int] = frozenset()  # ids of topics
        while not self.stopped.is_set() and time.monotonic() < ends_at:
            if self._maintain() or len(new) > FEW_TOPICS:
                new = frozenset()  # look for all there may be
            done = self.relay.step(new)
            if done.batches:
                idle_since = None
                if done.claimed >= MANY:
                    self._withdraw()
                if not new or done.claimed >= MANY:
                    new = frozenset()
                    continue
            else:
                idle_since = idle_since or time.monotonic()
                if idle_timeout is not None and self._is_over(idle_since, idle_timeout):
                    break
            new = self._be_idle()
        self._withdraw()
        return self.relay.total

    def deregister(self) -> None:
        """Take the heartbeat away: nobody comes back."""
        heartbeats.leave(self._connection, "relay", broker=self.target.broker)

    def stop(self) -> None:
        """Ask `run` to finish what the broker has been handed, release the rest and return; from any thread."""
        self.stopped.set()
        self.relay.stop()

    def _is_over(self, idle_since: float, idle_timeout: timedelta) -> bool:
        if not idle_timeout or self.relay.breakers.state is BreakerState.OPEN:
            return True
        if self._waker is None or not self._waker.is_on_call:
            return self._listening().is_another_on_call()
        return time.monotonic() - idle_since >= idle_timeout.total_seconds()

    def _be_idle(self) -> frozenset[int]:
        """
        Go on call first and claim once more; the next time, wait for publishers. While another relay is on call, only wait.

        Returns:
            As `Waker.wait`.
        """
        waker = self._listening()
        if self.relay.breakers.state is BreakerState.OPEN:
            waker.withdraw()
            self.stopped.wait(min(self.relay.breakers.seconds_left, MAINTENANCE_EVERY))
        elif waker.is_on_call or not waker.announce():
            return waker.wait()
        return frozenset()

    def _withdraw(self) -> None:
        if self._waker is not None:
            self._waker.withdraw()

    def _listening(self) -> Waker:
        if self._waker is None:
            connection = database.connect_session(self.target.database, application_name="outbox listener")
            listener = self._stack.enter_context(connection)
            self._waker = Waker(listener, self.relay.lane, self.target.broker, is_resident=self._is_resident, **IDLE_WAITS)
        return self._waker

    def _maintain(self) -> bool:
        """Once a second: what is due by time, not by a publisher. Return whether that was now."""
        if time.monotonic() < self._maintenance_at:
            return False
        while move_due(self._connection) == MOVED_AT_ONCE and not self.stopped.is_set():
            pass
        self.relay.claims.foreign |= _foreign_topics(self.target.database, self._connection)
        self.relay.sweep()
        forget_dead(self._connection)
        heartbeats.beat(
            self._connection,
            "relay",
            broker=self.target.broker,
            lane=self.relay.lane.number,
            breaker=self.relay.breakers.describe(),
            note=self._note,
        )
        if self._waker is not None and self._waker.is_on_call:
            self._waker.announce()
        self._maintenance_at = time.monotonic() + MAINTENANCE_EVERY
        return True


def require_sessions(aliases: Iterable[str]) -> None:
    """
    Raise where a pooler gives the session of a connection to others. A database that is away is outlasted later.

    Raises:
        ConfigurationError: as `database.connect_session`.
    """
    for alias in sorted(set(aliases)):
        with suppress(psycopg.OperationalError):
            database.connect_session(alias).close()


@contextmanager
def open_runner(target: RelayTarget, *, note: str) -> Iterator[RelayRunner]:
    """
    Connect, take the lowest free lane and make the broker's client; close all of it at the end.

    Raises:
        LaneNotHeld: other relays hold all lanes.
        ConfigurationError: a pooler in transaction mode stands before the database.
        NotMigrated: the database has no tables of the outbox, or is a replica.
        psycopg.OperationalError: the database cannot be reached.
    """
    with ExitStack() as stack:
        lease = conf.settings().relay.lease
        connection = stack.enter_context(
            database.connect_session(target.database, application_name="outbox relay", patience=lease, settings=STATEMENTS)
        )
        database.ensure_fit(target.database, connection)
        lane = take_lane(connection, lanes=conf.settings().relay.lanes)
        _foreign_topics(target.database, connection)  # so that a first message finds its row
        broker = conf.make_broker(target.broker)
        stack.callback(broker.close)
        yield RelayRunner(target, connection, broker, lane, note, stack)


def run_once(
    target: RelayTarget, *, note: str, at_most: timedelta, idle_timeout: timedelta, ending: Watch | None = None
) -> RelayResult:
    """
    Relay what waits for a target, and close everything.

    Args:
        ending: stops the relay when it is asked for.

    Raises:
        LaneNotHeld, NotMigrated, psycopg.Error: as `open_runner` and `RelayRunner.run`.
    """
    with open_runner(target, note=note) as runner:
        if ending is not None:
            ending.when_asked(runner.stop)
        return runner.run(at_most=at_most, idle_timeout=idle_timeout)


_breakers: dict[RelayTarget, tuple[conf.Settings, Breakers]] = {}


def _breakers_of(target: RelayTarget) -> Breakers:
    """
    Return the breakers that this process keeps for a target, new ones when settings have changed.

    Else each Celery task would begin with closed ones, and an outage cost as many tries as if there were none.
    """
    settings = conf.settings()
    known = _breakers.get(target)
    if known is None or known[0] is not settings:
        known = _breakers[target] = settings, make_breakers()
    return known[1]


@dataclass(frozen=True, slots=True)
class _Matched:
    """When this process last compared the topic rows of a database with which settings, and which topics only the rows have."""

    settings: conf.Settings
    at: float
    foreign: frozenset[str]


_matched: dict[tuple[str, str], _Matched] = {}


def _foreign_topics(alias: str, connection: Connection) -> frozenset[str]:
    """Return the topics that the settings do not have; the rows of the others are corrected, each process now and then."""
    place = alias, str(connections[alias].settings_dict["NAME"])  # of one database, aliases may lead to several schemas
    last = _matched.get(place)
    if last is None or last.settings is not conf.settings() or time.monotonic() - last.at > MATCH_TOPICS_EVERY:
        foreign = frozenset(match_topics(connection))
        last = _matched[place] = _Matched(conf.settings(), time.monotonic(), foreign)
    return last.foreign
