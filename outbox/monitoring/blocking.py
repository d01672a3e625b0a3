"""
Find the PostgreSQL sessions that hold locks for which the outbox waits.

Only the server's views are read, so nothing here waits for a lock of a table.
"""

from __future__ import annotations

from outbox.database import Connection
from outbox.database.locks import Lock
from outbox.findings import Finding
from outbox.monitoring.text import age, count

# A session waits for the outbox if it waits for one of its tables or advisory locks, or with a statement that names one of its
# tables. A blocking session that waits itself is left out, since the session that blocks it is reported. A lock of a whole table
# counts even if no session waits for it, since a query that was cancelled after its lock timeout no longer waits.
BLOCKING = f"""
WITH wanted AS MATERIALIZED (
    SELECT w.pid, coalesce(extract(epoch FROM clock_timestamp() - w.waitstart), 0)::float8 AS seconds, a.application_name
    FROM pg_locks w JOIN pg_stat_activity a ON a.pid = w.pid LEFT JOIN pg_class c ON c.oid = w.relation
    WHERE NOT w.granted AND a.datname = current_database() AND (
        starts_with(c.relname, 'outbox_') OR strpos(a.query, 'outbox_') > 0
        OR w.locktype = 'advisory' AND w.classid BETWEEN {min(Lock)} AND {max(Lock)})
),
pair AS (
    SELECT blocking.pid, wanted.pid AS waiting, wanted.seconds, wanted.application_name AS waiter
    FROM wanted CROSS JOIN LATERAL unnest(pg_blocking_pids(wanted.pid)) AS blocking (pid)
    UNION ALL
    SELECT held.pid, NULL, 0, NULL FROM pg_locks held JOIN pg_class c ON c.oid = held.relation
    WHERE held.granted AND held.mode = 'AccessExclusiveLock' AND starts_with(c.relname, 'outbox_')
      AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
SELECT pair.pid, coalesce(a.usename, '') AS role, coalesce(a.application_name, '') AS application, coalesce(a.state, '') AS state,
    extract(epoch FROM clock_timestamp() - a.state_change)::float8 AS state_seconds,
    count(DISTINCT waiting)::int AS waiting, max(seconds)::float8 AS waiting_seconds,
    coalesce(array_agg(DISTINCT waiter) FILTER (WHERE waiter <> ''), '{{}}') AS waiters
FROM pair LEFT JOIN pg_stat_activity a ON a.pid = pair.pid
WHERE pair.pid <> pg_backend_pid() AND pair.pid NOT IN (SELECT pid FROM wanted)
GROUP BY pair.pid, a.usename, a.application_name, a.state, a.state_change HAVING max(seconds) >= %s ORDER BY max(seconds) DESC
"""


def read_blocking(connection: Connection, *, seconds: float) -> list[Finding]:
    """
    Return a finding for each session that holds locks for which the outbox waits.

    Args:
        seconds: the minimum time for which another session has waited; with 0, also sessions that hold the lock of a whole table.
    """
    return [_finding(*row) for row in connection.execute(BLOCKING, [seconds]).fetchall()]


def _finding(
    pid: int,
    role: str,
    application: str,
    state: str,
    state_seconds: float | None,
    waiting: int,
    waiting_seconds: float,
    waiters: list[str],
) -> Finding:
    """
    Return the finding about a session.

    Args:
        pid: the id of the server's process; 0 for a prepared transaction.
        state, state_seconds: active, idle in transaction, …, and for how long; "" and None if this role may not see it.
        waiting, waiting_seconds, waiters: the number of sessions that wait, the longest wait, and their application names.
    """
    lasts = f"{state} for {age(state_seconds)}" if state and state_seconds is not None else "state hidden"
    cause = f"It holds locks of the outbox ({application or 'no name'}, user {role or 'hidden'}, {lasts})"
    if waiting:
        names = f": {', '.join(waiters)}" if waiters else ""
        cause = f"{cause}, for which {count(waiting, 'session')} waited up to {age(waiting_seconds)}{names}"
    step = f"Commit or roll back in that session, or end it: SELECT pg_terminate_backend({pid})."
    if not pid:
        step = "Find it in pg_prepared_xacts, and run COMMIT PREPARED or ROLLBACK PREPARED with its gid."
    subject = f"session {pid}" if pid else "a prepared transaction"
    return Finding("outbox.blocked", subject, f"{cause}.", step, seconds=waiting_seconds)
