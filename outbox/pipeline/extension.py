"""The pipeline's additions to the outbox: admin pages, pruned tables, and findings about audits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

from django.contrib.admin import ModelAdmin
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy as _

from outbox import conf, database
from outbox.brokers.capabilities import Receives, SpeaksKafka, StoredInDatabase
from outbox.database import Connection
from outbox.extensions import Extension, Page
from outbox.findings import Finding, Needs, rule
from outbox.monitoring.status import Status
from outbox.monitoring.text import age, count
from outbox.pipeline.archive import HOLD
from outbox.pipeline.conf import settings
from outbox.pipeline.models import ArchivedDay, AuditFinding, AuditRun
from outbox.pipeline.recorder import PAST_RETENTION, recorder_group

HAS_TABLES = "SELECT to_regclass('outbox_audit_finding') IS NOT NULL"

# The open findings of the newest finished audit, which are neither acknowledged nor sent again.
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
    outbox_pipeline.audit: The last audit has open findings, or it failed.
        Review the findings on their page in the admin. After a failure, correct the error and run the audit again.
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


class PipelineExtension(Extension):
    tables = {"outbox_recorded": PAST_RETENTION}
    retention_hold = HOLD
    pages = (
        Page(90, _("Audits"), AuditRun, "outbox_pipeline_auditrun_changelist"),
        Page(100, _("Findings"), AuditFinding, "outbox_pipeline_auditfinding_changelist"),
        Page(130, _("Archived days"), ArchivedDay, "outbox_pipeline_archivedday_changelist"),
    )

    def consumer_groups(self, broker: str) -> Iterable[str]:
        kind = conf.broker_class(broker)
        # The audit itself reads brokers that keep their messages in a database, and Kafka.
        is_recorded = Receives.has(kind) and not (StoredInDatabase.has(kind) or SpeaksKafka.has(kind))
        return map(recorder_group, database.outbox_databases()) if is_recorded else ()

    def has_archive(self) -> bool:
        return settings().archive is not None

    def archived_message(self, model_admin: ModelAdmin[Any], request: HttpRequest, message_id: UUID) -> HttpResponse:
        from outbox.pipeline.admin.archived import archived_message  # imported only here, because a project may have no admin

        return archived_message(model_admin, request, message_id)
