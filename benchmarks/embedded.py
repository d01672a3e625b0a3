"""The relay into the embedded broker, against plain statements that do the same writes: messages per second, CPU per message."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import raw_update
from benchmarks.cpu import CpuClock
from benchmarks.figure import Figure, interleaved
from benchmarks.history import empty, fill
from outbox import conf, database
from outbox.database import Connection
from outbox.relay.lane import take_lane
from outbox.relay.rounds import Relay
from outbox.topics import topic_id

TABLES = """
DROP TABLE IF EXISTS bench_raw_half, bench_raw_message;
CREATE TABLE bench_raw_half (LIKE outbox_embedded_half INCLUDING ALL);
CREATE TABLE bench_raw_message (LIKE outbox_embedded_message INCLUDING ALL)
"""

STORE = """
INSERT INTO bench_raw_half (id, topic_id, queue, message_id, source, key, tag, headers, body, token, born_at, ask_at)
SELECT n, 1, 0, id, 'raw', key, '', headers, body, 'raw:1:1:' || n, now(), now()
FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::bytea[]) g (n, id, key, headers, body)
"""

SHOW = """
WITH leaving AS (DELETE FROM bench_raw_half WHERE id = ANY(%s) RETURNING *)
INSERT INTO bench_raw_message (topic_id, queue, pos, message_id, source, half_id, key, tag, headers, body, stored_at)
SELECT 1, 0, id, message_id, source, id, key, tag, headers, body, now() FROM leaving
"""

SEND = """
INSERT INTO bench_raw_message (topic_id, queue, pos, message_id, source, key, tag, headers, body, stored_at)
SELECT 1, 0, n, id, 'raw', key, '', headers, body, now()
FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::bytea[]) g (n, id, key, headers, body)
"""

BROKERS_BACKENDS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'outbox embedded broker'"

EMPTY_BROKER = "TRUNCATE outbox_embedded_half, outbox_embedded_message, outbox_embedded_queue"


def measure(scale: float) -> list[Figure]:
    """Compare a drain into the embedded broker with the raw bound."""
    count = int(20_000 * scale)
    with database.connect("default") as connection:
        lane = take_lane(connection, lanes=16)
        broker = conf.make_broker("default")
        relay = Relay(connection, broker, lane)
        relay.drain()
        broker.find("none")  # it has its connection now
        raw_two, two, raw_one, one = interleaved(
            5,
            lambda: _raw(connection, count, is_two_phase=True).rate,
            lambda: _relayed(connection, relay, count, "bench-two-phase").rate,
            lambda: _raw(connection, count, is_two_phase=False).cpu,
            lambda: _relayed(connection, relay, count, "bench-consumed").cpu,
        )
        broker.close()
    return [
        Figure("relay to embedded, two-phase: messages", two, "/s", 0.5, at_most=False, bound=raw_two),
        Figure("relay to embedded, one-phase: CPU per message", one, "us", 0.75, at_most=True, bound=raw_one),
    ]


@dataclass(frozen=True)
class Measured:
    """
    What moving the messages took.

    Args:
        rate: messages a second.
        cpu: microseconds per message, of this process and of its backends.
    """

    rate: float
    cpu: float


def _raw(connection: Connection, count: int, *, is_two_phase: bool) -> Measured:
    raw_update.fill(connection, count)
    connection.execute(TABLES)
    return _measured(connection, lambda: _drain(connection, is_two_phase=is_two_phase), count)


def _drain(connection: Connection, *, is_two_phase: bool) -> int:
    done = 0
    while rows := connection.execute(raw_update.CLAIM).fetchall():
        numbers = list(range(done, done + len(rows)))
        columns = [[str(row[0]) for row in rows], *([row[n] for row in rows] for n in (2, 3, 4))]
        connection.execute(STORE if is_two_phase else SEND, [numbers, *columns])
        if is_two_phase:
            connection.execute(SHOW, [numbers])
        connection.execute(raw_update.MARK, [[row[0] for row in rows]])
        done += len(rows)
    return done


def _relayed(connection: Connection, relay: Relay, count: int, topic: str) -> Measured:
    empty(connection)
    connection.execute(EMPTY_BROKER)
    fill(connection, [topic_id(topic, "default")], count)
    return _measured(connection, lambda: relay.drain().sent, count)


def _measured(connection: Connection, work: Callable[[], int], count: int) -> Measured:
    clock = CpuClock(connection, *(pid for (pid,) in connection.execute(BROKERS_BACKENDS)))
    began, cpu_before = time.perf_counter(), clock()
    done = work()
    seconds, cpu = time.perf_counter() - began, clock() - cpu_before
    assert done == count, f"{done} of {count} messages were moved"
    return Measured(done / seconds, cpu / count * 1e6)
