"""Errors of the pipeline's Django side. The errors of its jobs are in `spark/__init__.py`."""

from __future__ import annotations

from outbox.errors import OutboxError


class ArchiveFailed(OutboxError):
    """Raised when the archive job failed. Committed days stay committed, and the next run continues with the others."""


class ArchiveRunning(ArchiveFailed):
    """Raised when an archive is started while another one of the same database is running."""


class AuditRunning(OutboxError):
    """Raised when an audit is started while another one of the same database is running."""


class AuditFailed(OutboxError):
    """Raised when an audit failed. The reason is also stored with its run."""


class InvalidVerdict(OutboxError):
    """Raised when a verdict is not byte for byte what was signed, is unsigned, or was signed with another key."""
