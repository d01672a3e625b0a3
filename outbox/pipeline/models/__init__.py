"""Tables of the data pipeline: audits and their findings, archived days, recorded messages."""

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
