"""The pipeline's admin pages: audits and their findings, archived days."""

from outbox.admin.pages import Page, register_page
from outbox.pipeline.admin import archived, audits, days, findings
from outbox.pipeline.models import ArchivedDay, AuditFinding, AuditRun

__all__ = ["archived", "audits", "days", "findings"]

for page in (
    Page(90, "Audits", AuditRun, "outbox_pipeline_auditrun_changelist"),
    Page(100, "Findings", AuditFinding, "outbox_pipeline_auditfinding_changelist"),
    Page(130, "Archived days", ArchivedDay, "outbox_pipeline_archivedday_changelist"),
):
    register_page(page)
