"""What the pipeline raises on Django's side; its jobs have `spark/errors.py`."""

from __future__ import annotations

from outbox.errors import OutboxError


class ArchiveFailed(OutboxError):
    """Raised when the archiving job did not come to its end; what it had committed stays, and the next one goes on."""


class ArchiveRunning(ArchiveFailed):
    """Raised when an archive is to begin while another one of the same database runs."""


class AuditRunning(OutboxError):
    """Raised when an audit is to begin while another one of the same database runs."""


class AuditFailed(OutboxError):
    """Raised when an audit gave no answer; its run says the same."""


class VerdictRefused(OutboxError):
    """Raised when a verdict is not, byte for byte, what was signed; or was not signed at all, or by another key."""
