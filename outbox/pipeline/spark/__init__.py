"""
Spark jobs over the whole history: audit, latency, backlog, archive.

No module here imports Django, and this one imports no other package, so that Django processes can use it without Spark. A job
gets its whole configuration as one `PipelineConfig` in JSON.

The errors of jobs are defined here, because `outbox.errors` needs Django.
"""

from __future__ import annotations


class PipelineError(Exception):
    """Raised when a job fails. The text says what to do. Findings of an audit are not errors."""

    exit_code = 2


class JavaMissing(PipelineError):
    """Raised when there is no Java, or none that Spark can use."""


class HistoryError(PipelineError):
    """Raised when a history cannot be read: a table or column is missing, the history is empty, or its snapshot has ended."""


class LakeError(PipelineError):
    """Raised when a folder, file or manifest of a lake cannot be read or written. The text names it."""


class AlreadyCommitted(LakeError):
    """Raised when a lake already has a commit of this day and attempt, because another archiver was faster."""


class ArchiverBusy(PipelineError):
    """Raised when another archiver of the same database is running."""

    exit_code = 3
