"""Tables of the outbox. `MessageRow` is the stored message, `outbox.Message` the type of what travels."""

from outbox.models.archive import ArchivedDay
from outbox.models.audit import AuditBacklog, AuditFinding, AuditLatency, AuditRun
from outbox.models.batch import Batch, DeadMessage, FailedAttempt, Lane, Process, State
from outbox.models.check_back import CheckBack
from outbox.models.embedded import (
    EmbeddedDelayed,
    EmbeddedDelivery,
    EmbeddedHalf,
    EmbeddedMessage,
    EmbeddedOffset,
    EmbeddedQueue,
    EmbeddedTopic,
    HalfState,
)
from outbox.models.inbox import DeadLetter, Duplicate, FailedDelivery, Gap, Inbox, InboxRow
from outbox.models.message import Dedupe, Delayed, MessageRow, MessageState, Ticket, Topic
from outbox.models.monitor import MonitorBucket, MonitorJob, MonitorLane, MonitorMissing
from outbox.models.recorder import RecordedMessage, RecordedTopic

__all__ = [
    "ArchivedDay",
    "AuditBacklog",
    "AuditFinding",
    "AuditLatency",
    "AuditRun",
    "Batch",
    "CheckBack",
    "DeadLetter",
    "DeadMessage",
    "Dedupe",
    "Delayed",
    "Duplicate",
    "EmbeddedDelayed",
    "EmbeddedDelivery",
    "EmbeddedHalf",
    "EmbeddedMessage",
    "EmbeddedOffset",
    "EmbeddedQueue",
    "EmbeddedTopic",
    "FailedAttempt",
    "FailedDelivery",
    "Gap",
    "HalfState",
    "Inbox",
    "InboxRow",
    "Lane",
    "MessageRow",
    "MessageState",
    "MonitorBucket",
    "MonitorJob",
    "MonitorLane",
    "MonitorMissing",
    "Process",
    "RecordedMessage",
    "RecordedTopic",
    "State",
    "Ticket",
    "Topic",
]
