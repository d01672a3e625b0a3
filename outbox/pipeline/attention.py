"""What audits add to the list of what needs attention."""

from __future__ import annotations

from collections.abc import Iterator

from outbox.database import Connection
from outbox.monitoring.attention import Attention, Kind
from outbox.monitoring.text import age, count

ARE_HERE = "SELECT to_regclass('outbox_audit_finding') IS NOT NULL"

# Findings of the newest audit that has an answer, which nobody has acknowledged and nothing was sent again for.
OPEN = """
SELECT count(*), min(f.text), max(r.id), extract(epoch FROM clock_timestamp() - max(r.ended_at))::float8
FROM outbox_audit_finding f JOIN outbox_audit_run r ON r.id = f.run_id
WHERE r.id = (SELECT max(id) FROM outbox_audit_run WHERE state = 'done')
  AND f.acknowledged_at IS NULL AND f.sent_again_at IS NULL
"""

# The newest audit of all, where it has no answer.
FAILED = """
SELECT id, error FROM outbox_audit_run
WHERE id = (SELECT max(id) FROM outbox_audit_run WHERE state IN ('done', 'failed')) AND state = 'failed'
"""


def find(connection: Connection, alias: str) -> Iterator[Attention]:
    """Find what audits of a database left open."""
    if connection.execute(ARE_HERE).fetchone() != (True,):
        return
    row = connection.execute(OPEN).fetchone()
    if row and row[0]:
        number, first, run, seconds = row
        cause = f"{count(number, 'finding')} of audit {run}, {age(seconds)} ago. The first: {first.rstrip('.')}."
        step = "See the admin's findings: send again what is lost, or acknowledge them."
        yield Attention(Kind.AUDIT, f"database {alias!r}", cause, step)
    failed = connection.execute(FAILED).fetchone()
    if failed:
        cause = f"Audit {failed[0]} has no answer: {failed[1].rstrip('.')}."
        yield Attention(Kind.AUDIT, f"database {alias!r}", cause, "Correct the cause, then run outbox_audit again.")
