"""The relay into the embedded broker, two-phase, against plain statements that do the same writes: messages per second."""

from __future__ import annotations

import time

from benchmarks import raw_update
from benchmarks.figure import Figure, interleaved
from benchmarks.history import empty, fill
from outbox import conf, database
from outbox.database import Connection
from outbox.relay.lane import leave_lane, take_lane
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

EMPTY_BROKER = "TRUNCATE outbox_embedded_half, outbox_embedded_message, outbox_embedded_queue"


def measure(scale: float) -> list[Figure]:
    """Compare a drain into the embedded broker with the raw bound."""
    count = int(20_000 * scale)
    with database.connect("default") as connection:
        lane = take_lane(connection, lanes=16)
        broker = conf.make_broker("default")
        relay = Relay(connection, broker, lane)
        raw, ours = interleaved(5, lambda: _raw(connection, count), lambda: _relayed(connection, relay, count))
        broker.close()
        leave_lane(connection, lane)
    return [Figure("relay to embedded, two-phase: messages", ours, "/s", 0.5, at_most=False, bound=raw)]


def _raw(connection: Connection, count: int) -> float:
    raw_update.fill(connection, count)
    connection.execute(TABLES)
    began = time.perf_counter()
    done = 0
    while rows := connection.execute(raw_update.CLAIM).fetchall():
        numbers = list(range(done, done + len(rows)))
        columns = [[row[0] for row in rows], *([row[n] for row in rows] for n in (2, 3, 4))]
        columns[0] = [str(message_id) for message_id in columns[0]]
        connection.execute(STORE, [numbers, *columns])
        connection.execute(SHOW, [numbers])
        connection.execute(raw_update.MARK, [[row[0] for row in rows]])
        done += len(rows)
    return done / (time.perf_counter() - began)


def _relayed(connection: Connection, relay: Relay, count: int) -> float:
    empty(connection)
    connection.execute(EMPTY_BROKER)
    fill(connection, [topic_id("bench-two-phase", "default")], count)
    began = time.perf_counter()
    done = relay.drain().sent
    seconds = time.perf_counter() - began
    assert done == count, f"{done} of {count} messages were moved"
    return done / seconds
