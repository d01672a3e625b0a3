"""
Run a relay for a target. There are two hosts: a Celery task runs it for a limited time, `outbox_relay` until it is stopped.

A target is one database and one broker. `open_runner` opens, and finally closes, everything that the relay needs. If the database
fails meanwhile, the run ends with psycopg's error, and no message is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial

import msgspec
import psycopg
from django.db import connections

from outbox import conf, database
from outbox.brokers.base import Broker
from outbox.database import Connection, heartbeats, loop_errors
from outbox.database.heartbeats import BEAT_SECONDS, SILENT_AFTER, SWEEP, WAKEUP
from outbox.database.identity import require_identity
from outbox.database.loop_errors import Loop
from outbox.errors import ConfigurationError, LaneBlocked, LaneNotHeld, NotMigrated
from outbox.logs import get_logger
from outbox.relay.breaker import Breakers, BreakerState
from outbox.relay.claims import MOVE_LIMIT, move_due
from outbox.relay.lane import take_lane
from outbox.relay.rounds import Relay, RelayResult, make_breakers
from outbox.relay.wakeup import Waker, forget_dead
from outbox.shutdown import ShutdownWatch
from outbox.topics import match_topics

logger = get_logger(__name__)

MAINTENANCE_SECONDS = 1.0  # interval of `RelayRunner._maintain`
BUSY_MESSAGES = 16  # a relay with this many messages in a round claims again at once, so it needs no notifications
FEW_TOPICS = 4  # if more topics have new messages, a full round is cheaper than a claim for each topic
MATCH_TOPICS_SECONDS = 5.0  # interval of comparing the topic rows with the settings
BLOCKED_SECONDS = 60.0  # for this time, a lane that could not be opened is taken only if no other is free
# Each statement of the relay can use an index. Sequential scans are disabled, since the tables fill and empty within seconds, so
# that the statistics are outdated. A generic plan is made once; planning each time would cost more than running the statement.
PLANNER_SETTINGS = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off"}
# How long an idle relay waits for a wakeup before it claims again; each wait is twice as long as the one before.
IDLE_WAITS = {"shortest": timedelta(milliseconds=20), "longest": timedelta(seconds=1)}
IDLE_TIMEOUT = timedelta(milliseconds=200)  # the `idle_timeout` of a task that a wakeup has started
NO_IDLE_TIMEOUT = timedelta(0)  # return as soon as nothing can be claimed


class RelayTarget(msgspec.Struct, frozen=True):
    """The database (Django's alias) and broker (alias in `OUTBOX["BROKERS"]`) between which a relay moves messages."""

    database: str
    broker: str

    @property
    def loop(self) -> Loop:
        """The name under which errors of this target's relay are recorded."""
        return Loop("relay", self.database, self.broker)

    def __str__(self) -> str:
        return f"database {self.database!r}, broker {self.broker!r}"


def databases(only: Sequence[str] | None = None) -> list[str]:
    """
    Return the aliases in `only`; by default, those of all databases that may hold messages.

    Raises:
        ConfigurationError: the settings lack one of `only`.
    """
    _require_known("database", only or (), list(connections))
    return list(only) if only else database.outbox_databases()


def relay_targets(only_databases: Sequence[str] | None = None, only_brokers: Sequence[str] | None = None) -> list[RelayTarget]:
    """
    Return the targets that need relays: each database that may hold messages, with each broker that has topics.

    Raises:
        ConfigurationError: the settings lack one of `only_databases` or `only_brokers`.
    """
    brokers = sorted(conf.settings().brokers)
    _require_known("broker", only_brokers or (), brokers)
    chosen = [broker for broker in only_brokers or brokers if conf.topics_of(broker)]
    return [RelayTarget(database, broker) for database in databases(only_databases) for broker in chosen]


def _require_known(kind: str, given: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [alias for alias in given if alias not in known]:
        raise ConfigurationError(
            f"There is no {kind} {', '.join(map(repr, unknown))} in settings.", hint=f"Choices are: {', '.join(known)}."
        )


class RelayRunner:
    """
    Runs the relay of a target, in the thread that made it.

    Args:
        connection: the relay's connection, whose session lock holds the lane.
        note: a text for operators that names the host of the relay.
        stack: closes the connections of the relay; the runner adds those that it opens.
        takes_over: as for `TransactionalSender`.
    """

    def __init__(
        self,
        target: RelayTarget,
        connection: Connection,
        broker: Broker,
        lane: int,
        note: str,
        stack: ExitStack,
        *,
        takes_over: bool = False,
    ) -> None:
        self.target = target
        self.relay = Relay(connection, broker, lane, breakers=_breakers_of(target), takes_over=takes_over)
        self.stopped = threading.Event()
        self.has_worked = False  # whether a step has been done without an error
        self._connection = connection
        self._note = note
        self._stack = stack
        self._waker: Waker | None = None
        self._is_long_running = True
        self._maintenance_at = 0.0
        self._step_at = 0.0  # when the current step began

    def run(self, *, at_most: timedelta | None = None, idle_timeout: timedelta | None = None) -> RelayResult:
        """
        Relay until `stop` is called or the time is over.

        Args:
            at_most: the maximum time to run; None for no limit.
            idle_timeout: return after this time without messages; or as soon as nothing can be claimed, if it is 0, the breaker
                is open, or another relay is on call. None: keep waiting.

        Raises:
            psycopg.Error: the database failed.
        """
        with self._separate_heartbeats():
            return self._run(at_most, idle_timeout)

    def _run(self, at_most: timedelta | None, idle_timeout: timedelta | None) -> RelayResult:
        self._is_long_running = idle_timeout is None
        ends_at = time.monotonic() + at_most.total_seconds() if at_most else float("inf")
        idle_since: float | None = None
        new_topics: frozenset[int] = frozenset()  # ids that a notification has named
        while not self.stopped.is_set() and time.monotonic() < ends_at:
            if not new_topics or len(new_topics) > FEW_TOPICS:
                new_topics = frozenset()  # claim from all topics
                self._maintain()
            self._step_at = time.monotonic()
            done = self.relay.step(new_topics)
            if not self.has_worked:
                self.has_worked = True
                if loop_errors.clear(self.target.loop):
                    self._beat(self._connection)
            if done.batches:
                idle_since = None
                if done.claimed >= BUSY_MESSAGES:
                    self._withdraw()
                if not new_topics or done.claimed >= BUSY_MESSAGES:
                    new_topics = frozenset()
                    continue
            else:
                idle_since = idle_since or time.monotonic()
                if idle_timeout is not None and self._has_timed_out(idle_since, idle_timeout):
                    break
            if new_topics and self._maintain():  # only after the step, so that the messages of a notification do not wait for it
                new_topics = frozenset()
                continue
            new_topics = self._wait()
        self._withdraw()
        return self.relay.total

    def deregister(self) -> None:
        """Delete the heartbeat, since this relay ends for good."""
        heartbeats.delete_heartbeat(self._connection, "relay", broker=self.target.broker)

    def beat_as_sweep(self) -> None:
        """Send a heartbeat of kind `sweep`, which shows that Celery beat is running."""
        heartbeats.beat(self._connection, SWEEP, broker=self.target.broker, note=self._note)

    def stop(self) -> None:
        """Ask `run` to finish the current send, release the remaining messages and return; may be called from any thread."""
        self.stopped.set()
        self.relay.stop()

    def _has_timed_out(self, idle_since: float, idle_timeout: timedelta) -> bool:
        """Return whether to end the run now, after a round that has claimed nothing; see `run`."""
        if not idle_timeout or self.relay.breakers.state is BreakerState.OPEN:
            return True
        if self._waker is None or not self._waker.is_on_call:
            return self._open_waker().is_another_on_call()
        return time.monotonic() - idle_since >= idle_timeout.total_seconds()

    def _wait(self) -> frozenset[int]:
        """
        Wait for new messages, and return the ids of their topics as `Waker.wait` does.

        If no relay is on call, go on call and return at once, so that the caller claims again; only the next call waits. If
        another relay is on call, or the breaker is open, wait without going on call.
        """
        waker = self._open_waker()
        if self.relay.breakers.state is BreakerState.OPEN:
            waker.withdraw()
            self.stopped.wait(min(self.relay.breakers.seconds_left, MAINTENANCE_SECONDS))
        elif waker.is_on_call or not waker.announce():
            return waker.wait()
        return frozenset()

    def _withdraw(self) -> None:
        if self._waker is not None:
            self._waker.withdraw()

    def _open_waker(self) -> Waker:
        if self._waker is None:
            connection = database.connect_session(self.target.database, application_name="outbox listener")
            listener = self._stack.enter_context(connection)
            self._waker = Waker(
                listener, self.relay.lane, self.target.broker, is_long_running=self._is_long_running, **IDLE_WAITS
            )
        return self._waker

    def _maintain(self) -> bool:
        """Do the work that is due once a second, if a second has passed; return whether it was done."""
        if time.monotonic() < self._maintenance_at:
            return False
        while move_due(self._connection) == MOVE_LIMIT and not self.stopped.is_set():
            pass
        self.relay.claims.foreign |= _foreign_topics(self.target.database, self._connection)
        self._require_same_source()
        self.relay.sweep()
        forget_dead(self._connection)
        self._beat(self._connection)
        if self._waker is not None and self._waker.is_on_call:
            self._waker.announce()
        self._maintenance_at = time.monotonic() + MAINTENANCE_SECONDS
        return True

    def _require_same_source(self) -> None:
        """Raise NotMigrated if the outbox no longer has the source id that this relay writes into messages and tokens."""
        if (source := require_identity(self._connection).source) != self.relay.source:
            raise NotMigrated(
                f"The source id of the outbox in database {self.target.database!r} has changed from {self.relay.source!r} to "
                f"{source!r}.",
                hint="The relay is started again with the new id.",
            )

    def _beat(self, connection: Connection) -> None:
        heartbeats.beat(
            connection,
            "relay",
            broker=self.target.broker,
            lane=self.relay.lane,
            breaker=self.relay.breakers.describe(),
            note=self._note,
            errors=loop_errors.read("relay", self.target.database, self.target.broker),
        )

    @contextmanager
    def _separate_heartbeats(self) -> Iterator[None]:
        """
        In the block, another thread sends heartbeats while a step takes long, since this thread may be waiting for the broker.

        If a step takes longer than its sends can take, the relay is stuck, and the thread sends no more heartbeats.
        """
        ended = threading.Event()
        name = f"Heartbeat of the relay of {self.target}"
        thread = threading.Thread(target=self._send_separate_heartbeats, args=[ended], name=name, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(BEAT_SECONDS)  # so that the thread sends none after `deregister`

    def _send_separate_heartbeats(self, ended: threading.Event) -> None:
        broker = self.relay.broker
        sends = Breakers.TOPICS + 1  # the maximum in a step during an outage, until the breaker of the broker opens
        send = max((broker.limits(broker.options, topic).send for topic in broker.topics.values()), default=timedelta())
        longest = (SILENT_AFTER + sends * send).total_seconds()
        while not ended.wait(BEAT_SECONDS):
            if self._step_at and BEAT_SECONDS < time.monotonic() - self._step_at < longest:
                _beat_separately(self.target, self._beat)


def require_sessions(aliases: Iterable[str]) -> None:
    """
    Raise an error if a pooler shares the sessions of connections among clients. Databases that are down are not checked.

    Raises:
        ConfigurationError: the connection goes through a pooler in transaction mode.
    """
    for alias in sorted(set(aliases)):
        with suppress(psycopg.OperationalError):
            database.connect_session(alias).close()


@contextmanager
def open_runner(target: RelayTarget, *, note: str, takes_over: bool = False) -> Iterator[RelayRunner]:
    """
    Connect, take the lowest free lane and open the broker's client; close all of them at the end.

    A lane that could not be opened in the last minute is taken only if no other is free.

    Args:
        takes_over: as for `TransactionalSender`.

    Raises:
        LaneNotHeld: other relays hold all lanes.
        ConfigurationError: the connection goes through a pooler in transaction mode.
        NotMigrated: the database has no tables of the outbox, or is a replica.
        psycopg.OperationalError: the database cannot be reached.
    """
    try:
        with ExitStack() as stack:
            runner = _open(target, note, stack, takes_over=takes_over)
            try:
                yield runner
            except LaneBlocked:
                _blocked_lanes(target)[runner.relay.lane] = time.monotonic() + BLOCKED_SECONDS
                raise
    except Exception as error:
        if loop_errors.record(target.loop, error):
            errors = loop_errors.read("relay", target.database, target.broker)
            beat = partial(heartbeats.beat, kind="relay", broker=target.broker, note=note, errors=errors, inserts_only=True)
            _beat_separately(target, beat)
        raise


def _open(target: RelayTarget, note: str, stack: ExitStack, *, takes_over: bool) -> RelayRunner:
    lease = conf.settings().relay.lease
    connection = stack.enter_context(
        database.connect_session(target.database, application_name="outbox relay", patience=lease, settings=PLANNER_SETTINGS)
    )
    database.ensure_fit(target.database, connection)
    blocked = [number for number, until in _blocked_lanes(target).items() if until > time.monotonic()]
    lane = take_lane(connection, lanes=conf.settings().relay.lanes, last=blocked)
    _foreign_topics(target.database, connection)  # so that the topics have rows before the first claim
    broker = conf.make_broker(target.broker)
    stack.callback(broker.close)
    return RelayRunner(target, connection, broker, lane, note, stack, takes_over=takes_over)


def _beat_separately(target: RelayTarget, beat: Callable[[Connection], None]) -> None:
    """Send a heartbeat over a separate connection; log an error of the database."""
    try:
        with database.connect(target.database, application_name="outbox heartbeat", connect_timeout=1) as connection:
            beat(connection)
    except psycopg.Error as error:
        logger.warning("A heartbeat of the relay of %s could not be sent: %s", target, str(error).strip())


def run_once(
    target: RelayTarget,
    *,
    note: str,
    at_most: timedelta,
    idle_timeout: timedelta,
    shutdown: ShutdownWatch | None = None,
    is_sweep: bool = False,
) -> RelayResult:
    """
    Relay the waiting messages of a target, then close everything.

    Args:
        note, at_most, idle_timeout: as for `RelayRunner` and its `run`.
        shutdown: stops the relay when the process is asked to end.
        is_sweep: whether Celery beat has started this run, which then also sends a heartbeat of kind `sweep`.

    Raises:
        LaneNotHeld, NotMigrated, psycopg.Error: see `open_runner` and `RelayRunner.run`.
    """
    try:
        with open_runner(target, note=note) as runner:
            if shutdown is not None:
                shutdown.on_request(runner.stop)
            if is_sweep:
                runner.beat_as_sweep()
            return runner.run(at_most=at_most, idle_timeout=idle_timeout)
    except LaneNotHeld:
        # Other relays do the work. The heartbeat still shows that a worker has taken the task.
        kind = SWEEP if is_sweep else WAKEUP
        _beat_separately(target, partial(heartbeats.beat, kind=kind, broker=target.broker, note=note))
        raise


@conf.cached
def _breakers_of(target: RelayTarget) -> Breakers:
    """
    Return the breakers that this process keeps for a target; new ones after settings have changed.

    If each Celery task made new breakers, they would begin closed, and each task would try to send during an outage.
    """
    return make_breakers()


@conf.cached
def _blocked_lanes(target: RelayTarget) -> dict[int, float]:
    """Return the lanes that this process could not open -> the monotonic time until which it prefers other lanes."""
    return {}


# Alias and name of a database -> the settings with which its topic rows were last compared, the monotonic time of that, and the
# topics that have rows and are not in the settings.
_compared_topics: dict[tuple[str, str], tuple[conf.Settings, float, frozenset[str]]] = {}


def _foreign_topics(alias: str, connection: Connection) -> frozenset[str]:
    """Return the topics that have rows and are not in settings. Periodically, first write the rows of topics in the settings."""
    key = alias, str(connections[alias].settings_dict["NAME"])  # two aliases may use different schemas of one database
    settings, at, foreign = _compared_topics.get(key, (None, 0.0, frozenset[str]()))
    if settings is not conf.settings() or time.monotonic() - at > MATCH_TOPICS_SECONDS:
        foreign = frozenset(match_topics(connection))
        _compared_topics[key] = conf.settings(), time.monotonic(), foreign
    return foreign
