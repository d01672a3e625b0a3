"""Tables of the data pipeline: what audits found, which days are archived, what recorder and monitor have seen."""

from outbox.pipeline.models.archive import ArchivedDay
from outbox.pipeline.models.audit import AuditBacklog, AuditFinding, AuditLatency, AuditRun
from outbox.pipeline.models.monitor import MonitorBucket, MonitorJob, MonitorLane, MonitorMissing
from outbox.pipeline.models.recorder import RecordedMessage, RecordedTopic

__all__ = [
    "ArchivedDay",
    "AuditBacklog",
    "AuditFinding",
    "AuditLatency",
    "AuditRun",
    "MonitorBucket",
    "MonitorJob",
    "MonitorLane",
    "MonitorMissing",
    "RecordedMessage",
    "RecordedTopic",
]
