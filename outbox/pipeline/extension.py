"""The pipeline's additions to the outbox."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.contrib.admin import ModelAdmin
from django.http import HttpRequest, HttpResponse

from outbox import conf, database
from outbox.brokers.capabilities import Receives, SpeaksKafka, StoredInDatabase
from outbox.extensions import Extension, Page
from outbox.pipeline.archive import HOLD
from outbox.pipeline.conf import settings
from outbox.pipeline.models import ArchivedDay, AuditFinding, AuditRun
from outbox.pipeline.recorder import PAST_RETENTION, recorder_group


class PipelineExtension(Extension):
    tables = {"outbox_recorded": PAST_RETENTION}
    retention_hold = HOLD
    pages = (
        Page(90, "Audits", AuditRun, "outbox_pipeline_auditrun_changelist"),
        Page(100, "Findings", AuditFinding, "outbox_pipeline_auditfinding_changelist"),
        Page(130, "Archived days", ArchivedDay, "outbox_pipeline_archivedday_changelist"),
    )

    def consumer_groups(self, broker: str) -> Iterable[str]:
        kind = conf.broker_class(broker)
        is_recorded = Receives.has(kind) and not (StoredInDatabase.has(kind) or SpeaksKafka.has(kind))  # else read by the audit
        return map(recorder_group, database.outbox_databases()) if is_recorded else ()

    def has_archive(self) -> bool:
        return settings().archive is not None

    def archived_message(self, model_admin: ModelAdmin[Any], request: HttpRequest, message_id: UUID) -> HttpResponse:
        from outbox.pipeline.admin.archived import archived_message  # a project may have no admin

        return archived_message(model_admin, request, message_id)
