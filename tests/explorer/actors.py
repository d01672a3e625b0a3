"""The actors of a schedule: the framework's processes, the time, and the requests that are late."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import psycopg
from django.db import DatabaseError, InterfaceError, connections

from outbox import conf, database, topics
from outbox.batches.operators import replay_all
from outbox.brokers.base import Broker
from outbox.brokers.memory.broker import MemoryBroker
from outbox.check_backs.loop import CheckLoop
from outbox.consuming.register import group
from outbox.consuming.worker import Worker
from outbox.errors import BrokenTransaction, BrokerUnavailable, HalfNotStored, LaneNotHeld
from outbox.relay.lane import take_lane
from outbox.relay.rounds import Relay
from tests.explorer import clock, statements
from tests.explorer.scheduler import Actor, Killed, current
from tests.explorer.shop import GROUP, Refused, place_order

OUTAGES = (psycopg.Error, DatabaseError, InterfaceError, BrokerUnavailable, LaneNotHeld)
LIVES = 3
LANES = 8
BROKER = "default"

Work = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Order:
    """An order that a publisher places."""

    number: int
    topic: str
    key: str = ""
    half_first: bool = False
    is_rolled_back: bool = False
    is_refused_once: bool = False  # by the broker, so that the message dies and an operator replays it

    def __str__(self) -> str:
        more = [f"key {self.key}" if self.key else "", "half first" if self.half_first else ""]
        more += ["rolled back" if self.is_rolled_back else "", "refused once" if self.is_refused_once else ""]
        return ", ".join([f"order {self.number} to {self.topic}", *filter(None, more)])


def process(work: Work) -> Callable[[Actor], None]:
    """Return the body of an actor that does some work, and begins again when it was killed."""

    def body(actor: Actor) -> None:
        for life in range(1, LIVES + 1):
            try:
                work()
                return
            except Killed:
                if life == LIVES:
                    return
            finally:
                _forget_connections(actor)
            actor.restart()

    return body


def _forget_connections(actor: Actor) -> None:
    was_killed, actor.is_killed = actor.is_killed, False
    for wrapper in connections.all(initialized_only=True):
        if wrapper.connection is not None and not wrapper.connection.closed:
            wrapper.connection.close()
        del connections[wrapper.alias]
    actor.is_killed = was_killed


def publisher(orders: Sequence[Order]) -> Work:
    """Place orders; what was not placed because of an outage is left."""

    def work() -> None:
        while waiting:
            order = waiting.pop(0)
            try:
                place_order(
                    order.number, order.topic, order.key, half_first=order.half_first, is_rolled_back=order.is_rolled_back
                )
            except (Refused, HalfNotStored, BrokenTransaction, *OUTAGES):
                connections["default"].close()

    waiting = list(orders)
    return work


@contextmanager
def running_relay() -> Iterator[Relay]:
    """Connect, take a lane and make a relay."""
    with database.connect_session("default", application_name="outbox relay") as connection:
        lane = take_lane(connection, lanes=LANES)
        with closing(conf.make_broker(BROKER)) as broker:
            yield Relay(connection, broker, lane, random=lambda: 0.5)


def _note_idle(is_idle: bool) -> None:
    actor = current()
    assert actor is not None
    actor.is_idle = is_idle


def relay(rounds: int) -> Work:
    """Relay and sweep until there was nothing to do so many times; after an outage, connect again."""

    def work() -> None:
        nonlocal rounds
        while rounds > 0:
            try:
                with running_relay() as relay:
                    while rounds > 0:
                        is_idle = not relay.step().batches
                        relay.sweep()
                        rounds -= is_idle
                        _note_idle(is_idle)
            except OUTAGES:
                rounds -= 1

    return work


def sweeper(rounds: int) -> Work:
    """Sweep only, as the task of Celery's beat does between relays."""

    def work() -> None:
        nonlocal rounds
        while rounds > 0:
            try:
                with running_relay() as relay:
                    while rounds > 0:
                        rounds -= 1
                        relay.sweep()
                        _note_idle(True)
            except OUTAGES:
                rounds -= 1

    return work


def check_loop(rounds: int) -> Work:
    """Ask about the half messages that are due."""

    def work() -> None:
        nonlocal rounds
        while rounds > 0:
            rounds -= 1
            with closing(CheckLoop(BROKER, "default")) as loop, suppress(*OUTAGES):
                loop.turn()
            _note_idle(True)

    return work


def consumer(rounds: int) -> Work:
    """Receive and handle."""

    def work() -> None:
        nonlocal rounds
        worker = Worker(group(GROUP), BROKER)
        while rounds > 0:
            rounds -= 1
            try:
                _note_idle(not worker.step(timedelta(0)))
            except OUTAGES:
                worker.close()
        worker.close()

    return work


def operator(acts: Sequence[str]) -> Work:
    """Pause and resume topics, and have dead messages sent again."""

    def work() -> None:
        while waiting:
            act, _, topic = waiting.pop(0).partition(" ")
            with suppress(*OUTAGES), database.connect("default") as connection:
                if act == "pause":
                    topics.pause(connection, topic, by="operator", reason="")
                elif act == "resume":
                    connection.execute("UPDATE outbox_topic SET paused = false, paused_at = NULL")
                else:
                    replay_all(connection, by="operator")

    waiting = list(acts)
    return work


def time(passes: Sequence[int]) -> Work:
    """Let seconds pass, for everybody at once."""

    def work() -> None:
        for seconds in passes:
            actor = current()
            assert actor is not None
            actor.stop(f"{seconds} s pass")
            let_pass(seconds)

    return work


def let_pass(seconds: int) -> None:
    """Move the clocks of the database and of Python."""
    statements.MONITOR[0].connection.execute(clock.MOVE, [seconds * 1_000_000])
    clock.CLOCK.passed += timedelta(seconds=seconds)


def network(times: int, broker: Broker, *, discards: bool) -> Work:
    """Deliver the requests that are late; have the broker give up the half messages that are not decided."""

    def work() -> None:
        for _ in range(times):
            actor = current()
            assert actor is not None
            actor.stop("late requests arrive")
            if isinstance(broker, MemoryBroker):
                actor.step.outcome = str(broker.deliver_late())
            if isinstance(broker, MemoryBroker) and discards:
                actor.stop("the broker discards half messages")
                actor.step.outcome = str(broker.discard_halves())

    return work
