"""
The bound: an outbox of one table that is claimed by one CTE UPDATE and marked by one bulk UPDATE, 500 rows at a time.

No fence, no numbers, no half messages; plain psycopg.
"""

from __future__ import annotations

from benchmarks.history import BODY, HEADERS
from outbox.brokers.base import Outgoing
from outbox.database import Connection

TABLE = """
CREATE TABLE IF NOT EXISTS bench_raw (
    id uuid PRIMARY KEY, seq bigint GENERATED ALWAYS AS IDENTITY, topic text NOT NULL, key text NOT NULL,
    headers text NOT NULL, body bytea NOT NULL, state smallint NOT NULL DEFAULT 0, attempt int NOT NULL DEFAULT 0,
    lease_until timestamptz, sent_at timestamptz, created_at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE INDEX IF NOT EXISTS bench_raw_waiting ON bench_raw (seq) WHERE state = 0;
CREATE INDEX IF NOT EXISTS bench_raw_key ON bench_raw (key);
TRUNCATE bench_raw
"""

FILL = """
INSERT INTO bench_raw (id, topic, key, headers, body)
SELECT gen_random_uuid(), 'bench', n::text, %s, %s FROM generate_series(1, %s) n
"""

CLAIM = """
WITH c AS (SELECT id FROM bench_raw WHERE state = 0 ORDER BY seq LIMIT 500 FOR UPDATE SKIP LOCKED)
UPDATE bench_raw r SET state = 1, attempt = attempt + 1, lease_until = now() + interval '30 s' FROM c WHERE r.id = c.id
RETURNING r.id, r.topic, r.key, r.headers, r.body
"""

MARK = "UPDATE bench_raw SET state = 2, sent_at = now(), lease_until = NULL WHERE id = ANY(%s)"


def fill(connection: Connection, count: int) -> None:
    """Write `count` waiting rows."""
    connection.execute(TABLE)
    connection.execute(FILL, [HEADERS, BODY, count])
    connection.execute("ANALYZE bench_raw")


def drain(connection: Connection) -> int:
    """Claim and mark without sending until nothing waits; return the number of rows."""
    done = 0
    while rows := connection.execute(CLAIM).fetchall():
        for row in rows:
            Outgoing(str(row[0]), row[1], bytes(row[4]), row[2])
        connection.execute(MARK, [[row[0] for row in rows]])
        done += len(rows)
    return done
