"""What a soak measures: memory of processes; connections, locks and tables of PostgreSQL; messages that wait."""

import subprocess
from collections.abc import Mapping

from django.db import connection

CONNECTIONS = """
SELECT 'connections', CASE application_name WHEN '' THEN 'of Django' ELSE application_name END, count(*)
FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
GROUP BY application_name
"""

LOCKS = """
SELECT 'locks', CASE locktype WHEN 'advisory' THEN 'advisory' ELSE 'other' END, count(*) FROM pg_locks
WHERE database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid <> pg_backend_pid() AND granted
GROUP BY 2
"""

# A table with its indexes, its TOAST table and its partitions.
TABLES = """
WITH part AS (
    SELECT coalesce(i.inhparent, c.oid)::regclass::text AS name, c.oid
    FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid WHERE c.relkind = 'r' AND c.relname LIKE 'outbox%'
)
SELECT kind, name, value FROM (
    SELECT name, sum(pg_total_relation_size(oid)) / 1048576.0 AS size, sum(pg_stat_get_dead_tuples(oid)) AS dead
    FROM part GROUP BY name
) found, LATERAL (VALUES ('size (MiB)', size), ('dead rows', dead)) figure(kind, value)
UNION ALL SELECT 'partitions', name, count(*) FROM part WHERE name = 'outbox_message' GROUP BY name
"""

MESSAGES = """
SELECT 'messages', 'waiting', (SELECT count(*) FROM outbox_ticket) + (SELECT count(*) FROM outbox_delayed)
UNION ALL SELECT 'messages', 'deferred', (SELECT count(*) FROM outbox_deferred)
UNION ALL SELECT 'messages', 'claimed', coalesce(sum(cardinality(message_ids) - cardinality(split)), 0)
FROM outbox_batch WHERE state IN (0, 1, 2)
UNION ALL SELECT 'messages', 'dead', coalesce(sum(cardinality(message_ids) - cardinality(split)), 0)
FROM outbox_batch WHERE state = 4
"""


def measure(processes: Mapping[str, int]) -> dict[tuple[str, str], float]:
    """Return the figures of now, by kind and subject. `processes`: those whose memory is measured, with their ids."""
    found = {("memory (MiB)", name): _memory(pid) for name, pid in processes.items()}
    with connection.cursor() as cursor:
        for statement in (CONNECTIONS, LOCKS, TABLES, MESSAGES):
            cursor.execute(statement)
            found |= {(kind, subject): float(value) for kind, subject, value in cursor.fetchall()}
    return found


def _memory(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    return int(subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], check=True, capture_output=True, text=True).stdout) / 1024
