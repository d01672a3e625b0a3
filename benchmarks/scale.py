"""
Whether size costs: the relay's CPU per message beside a long history, a backlog and many topics, against an empty outbox.

The two are databases of one server, which the same process drains in turn. The null broker takes all, so what is left is the
relay's own cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.conf import settings as django_settings
from django.db import connections
from django.test.utils import override_settings

from benchmarks.cpu import CpuClock
from benchmarks.figure import Figure, interleaved
from benchmarks.history import fill, fill_sent
from outbox import conf, database
from outbox.database import Connection
from outbox.relay.hosts import PLANNER_SETTINGS
from outbox.relay.lane import take_lane
from outbox.relay.rounds import Relay
from outbox.topics import match_topics, topic_id

EMPTY, FULL = "bench_empty", "bench_full"  # databases, and their aliases
MOVED, WAITING, SENT = "bench-null-one-phase", "bench-null-paused", "bench-null-other-0"
MILLION, TOPICS, AT_ONCE = 1_000_000, 10_000, 20_000
ROUNDS = 9
MOST = 1.05  # of what a message costs in an empty outbox


def measure(scale: float) -> list[Figure]:
    """Grow one outbox step by step, and drain it and an empty one in turn after each. `measure(10)`: ten million of each."""
    each, topics = int(MILLION * scale), max(100, int(TOPICS * min(1, scale)))
    count = max(5_000, int(AT_ONCE * min(1, scale)))
    figures = []
    with _topics(topics), _databases(), _relay(EMPTY) as small, _relay(FULL) as large:
        for name, grow in (
            (f"{each:,} sent", lambda: fill_sent(large.connection, topic_id(SENT, FULL), each)),
            (f"{each:,} waiting, of a paused topic", lambda: _fill_paused(large.connection, each)),
            (f"{topics:,} topics", lambda: match_topics(large.connection)),
        ):
            grow()
            _settle(large.connection)
            figures.append(_compared(f"relay, {name}: CPU per message", small, large, count))
    return figures


def _compared(name: str, small: Relay, large: Relay, count: int) -> Figure:
    for relay in (small, large):  # once unmeasured: statements are prepared, pages are in memory
        _drained(relay, count)
    bound, value = interleaved(ROUNDS, lambda: _drained(small, count), lambda: _drained(large, count))
    return Figure(name, value, "us", MOST, at_most=True, bound=bound)


def _drained(relay: Relay, count: int) -> float:
    """Return the microseconds that each message takes, of this process and of the relay's backend."""
    connection = relay.connection
    fill(connection, [topic_id(MOVED, connection.info.dbname)], count)  # the alias is the database's name
    connection.execute("VACUUM outbox_ticket")
    clock = CpuClock(connection)
    began = clock()
    sent = relay.drain().sent
    taken = clock() - began
    assert sent == count, f"{sent} of {count} messages were moved"
    return taken / count * 1e6


def _fill_paused(connection: Connection, count: int) -> None:
    number = topic_id(WAITING, FULL)
    connection.execute("UPDATE outbox_topic SET paused = true WHERE id = %s", [number])
    fill(connection, [number], count)


def _settle(connection: Connection) -> None:
    """Vacuum first, so that autovacuum does not start during the measurement."""
    connection.execute("VACUUM ANALYZE")
    connection.execute("CHECKPOINT")


@contextmanager
def _relay(alias: str) -> Iterator[Relay]:
    with database.connect(alias, settings=PLANNER_SETTINGS) as connection:
        lane = take_lane(connection, lanes=16)
        yield Relay(connection, conf.make_broker("null"), lane)


@contextmanager
def _topics(count: int) -> Iterator[None]:
    """Add topics to the null broker."""
    ours = django_settings.OUTBOX
    more = {f"bench-idle-{number}": {"TYPE": "normal", "BROKER": "null"} for number in range(count)}
    with override_settings(OUTBOX={**ours, "TOPICS": {**ours["TOPICS"], **more}}):
        yield


@contextmanager
def _databases() -> Iterator[None]:
    """Copy the migrated database twice, under separate aliases, for the duration of the block."""
    given: dict[str, Any] = dict(connections.databases["default"])
    connections["default"].close()
    original = given["NAME"]
    with database.connect("default", dbname="postgres") as connection:
        for name in (EMPTY, FULL):
            connection.execute(f"DROP DATABASE IF EXISTS {name}")
            connection.execute(f'CREATE DATABASE {name} TEMPLATE "{original}"')
            connections.databases[name] = {**given, "NAME": name}
            with database.connect(name) as own:
                own.execute("TRUNCATE outbox_message, outbox_ticket, outbox_delayed, outbox_batch, outbox_lane")
        try:
            yield
        finally:
            for name in (EMPTY, FULL):
                connections[name].close()
                del connections[name], connections.databases[name]
                connection.execute(f"DROP DATABASE {name}")
