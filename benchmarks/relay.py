"""The relay against an outbox without fence and numbers, both without a broker: CPU per message."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from benchmarks import raw_update
from benchmarks.cpu import CpuClock
from benchmarks.figure import Figure, interleaved
from benchmarks.history import empty, fill
from outbox import conf, database
from outbox.database import Connection
from outbox.relay.hosts import PLANNER_SETTINGS
from outbox.relay.lane import take_lane
from outbox.relay.rounds import Relay
from outbox.topics import topic_id

OTHERS = [f"bench-null-other-{n}" for n in range(3)]
AWAY = "bench-null-away"
SKEWED = [f"bench-skewed-{n}" for n in range(200)]


def measure(scale: float) -> list[Figure]:
    """Compare one-phase, two-phase, 200 skewed topics, and a million messages of a paused topic in front."""
    count = int(20_000 * scale)
    with database.connect("default") as connection, _relay() as relay:
        own_raw: list[float] = []
        own_one: list[float] = []
        raw, one, two, skewed = interleaved(
            5,
            lambda: _raw(connection, count, own=own_raw),
            lambda: _drained(relay, ["bench-null-one-phase"], count, own=own_one),
            lambda: _drained(relay, ["bench-null-two-phase"], count),
            lambda: _drained(relay, _skew(SKEWED), count),
        )
        with _paused(connection, "bench-null-paused", int(1_000_000 * scale)):
            behind = _drained(relay, ["bench-null-one-phase"], count, keep=True)
        empty(connection)
        alone = _drained(relay, ["bench-null-one-phase"], count)
        well, beside = interleaved(
            7,
            lambda: _rate_of_others(relay, count, is_away=False),
            lambda: _rate_of_others(relay, count, is_away=True),
        )
    return [
        Figure("relay, one-phase: CPU per message", one, "us", 0.6, at_most=True, bound=raw),
        Figure("relay, two-phase: CPU per message", two, "us", 0.75, at_most=True, bound=raw),
        Figure("relay, one-phase: its own Python", median(own_one), "us", 2, at_most=True, bound=median(own_raw)),
        Figure("relay, 200 skewed topics: CPU per message", skewed, "us", 0.9, at_most=True, bound=raw),
        Figure("relay, 1 M paused in front: CPU per message", behind, "us", 1.3, at_most=True, bound=alone),
        Figure("relay, one of four topics away: the others", beside, "/s", 0.95, at_most=False, bound=well),
    ]


@contextmanager
def _relay() -> Iterator[Relay]:
    with database.connect("default", settings=PLANNER_SETTINGS) as connection:
        yield Relay(connection, conf.make_broker("null"), take_lane(connection, lanes=16))


def _raw(connection: Connection, count: int, *, own: list[float] | None = None) -> float:
    raw_update.fill(connection, count)
    return _cpu_per_message(connection, lambda: raw_update.drain(connection), count, own)


def _drained(relay: Relay, topics: list[str], count: int, *, keep: bool = False, own: list[float] | None = None) -> float:
    if not keep:
        empty(relay.connection)
    fill(relay.connection, [topic_id(topic, "default") for topic in topics], count)
    return _cpu_per_message(relay.connection, lambda: relay.drain().sent, count, own)


def _cpu_per_message(connection: Connection, work: Callable[[], int], count: int, own: list[float] | None = None) -> float:
    """Return the microseconds of this process and of its backend; `own` gets those of this process only."""
    clock = CpuClock(connection)
    began, began_here = clock(), time.process_time()
    done = work()
    here, both = time.process_time() - began_here, clock() - began
    assert done == count, f"{done} of {count} messages were moved"
    if own is not None:
        own.append(here / count * 1e6)
    return both / count * 1e6


def _skew(topics: list[str]) -> list[str]:
    """Half of the messages in one topic, a quarter in the next, and so on; a few in each of the rest."""
    weights = [max(1, 256 >> n) for n in range(len(topics))]
    return [topic for topic, weight in zip(topics, weights, strict=True) for _ in range(weight)]


def _rate_of_others(relay: Relay, count: int, *, is_away: bool) -> float:
    """Return how many messages per second of three topics are sent, with or without a backlog of a fourth, unavailable one."""
    topics = [topic_id(name, "default") for name in OTHERS]
    empty(relay.connection)
    fill(relay.connection, topics, count)
    if is_away:
        fill(relay.connection, [topic_id(AWAY, "default")], count // 3)
        relay.broker.away = {AWAY}  # type: ignore[attr-defined]
    began, sent = time.perf_counter(), 0
    while sent < count:
        sent += relay.step().sent
    rate = sent / (time.perf_counter() - began)
    relay.broker.away = set()  # type: ignore[attr-defined]
    relay.breakers.note_answer(AWAY)
    return rate


@contextmanager
def _paused(connection: Connection, topic: str, count: int) -> Iterator[None]:
    empty(connection)
    number = topic_id(topic, "default")
    connection.execute("UPDATE outbox_topic SET paused = true WHERE id = %s", [number])
    fill(connection, [number], count)
    try:
        yield
    finally:
        connection.execute("UPDATE outbox_topic SET paused = false WHERE id = %s", [number])
