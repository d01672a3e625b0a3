"""Open findings and failed audits, for the list of what needs attention."""

from __future__ import annotations

from collections.abc import Iterator

from outbox.database import Connection
from outbox.findings import Finding, Needs, rule
from outbox.monitoring.status import Status
from outbox.monitoring.text import age, count

HAS_TABLES = "SELECT to_regclass('outbox_audit_finding') IS NOT NULL"

# Open findings of the newest finished audit: neither acknowledged nor sent again.
OPEN_FINDINGS = """
SELECT count(*), min(f.text), max(r.id), extract(epoch FROM clock_timestamp() - max(r.ended_at))::float8
FROM outbox_audit_finding f JOIN outbox_audit_run r ON r.id = f.run_id
WHERE r.id = (SELECT max(id) FROM outbox_audit_run WHERE state = 'done')
  AND f.acknowledged_at IS NULL AND f.resent_at IS NULL
"""

# The newest audit, if it failed.
FAILED_AUDIT = """
SELECT id, error FROM outbox_audit_run
WHERE id = (SELECT max(id) FROM outbox_audit_run WHERE state IN ('done', 'failed')) AND state = 'failed'
"""


@rule("outbox_pipeline.audit", needs=Needs.DATABASE)
def _audits(status: Status, connection: Connection) -> Iterator[Finding]:
    """
    outbox_pipeline.audit: There are open findings of the last audit, or it ended without an answer.
        Review them on the findings page; correct the error, and run the audit again.
    """
    if connection.execute(HAS_TABLES).fetchone() != (True,):
        return
    row = connection.execute(OPEN_FINDINGS).fetchone()
    if row and row[0]:
        number, first, run, seconds = row
        cause = f"{count(number, 'finding')} of audit {run}, {age(seconds)} ago. The first: {first.rstrip('.')}."
        step = "Review the findings in the admin: send lost messages again, or acknowledge the finding."
        yield Finding("outbox_pipeline.audit", f"database {status.database!r}", cause, step, seconds=seconds)
    failed = connection.execute(FAILED_AUDIT).fetchone()
    if failed:
        cause = f"Audit {failed[0]} failed: {failed[1].rstrip('.')}."
        step = "Fix the cause, then run outbox_audit again."
        yield Finding("outbox_pipeline.audit", f"database {status.database!r}", cause, step)
