"""Tables of the data pipeline: what audits found, which days are archived, what the recorder has seen."""

from outbox.pipeline.models.archive import ArchivedDay
from outbox.pipeline.models.audit import AuditBacklog, AuditFinding, AuditLatency, AuditRun
from outbox.pipeline.models.recorder import RecordedMessage, RecordedTopic

__all__ = [
    "ArchivedDay",
    "AuditBacklog",
    "AuditFinding",
    "AuditLatency",
    "AuditRun",
    "RecordedMessage",
    "RecordedTopic",
]
