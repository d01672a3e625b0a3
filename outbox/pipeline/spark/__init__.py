"""
Spark jobs over the whole history: audit, latency, backlog, archive.

Nothing here imports Django, and heavy packages are imported only when a job runs. A job gets its whole configuration as one
`PipelineConfig` in JSON.

Errors of jobs are here, and not in `outbox.errors`, which needs Django.
"""

from __future__ import annotations


class PipelineError(Exception):
    """Raised when a job fails; the text says what to do. Findings of an audit are not errors."""

    exit_code = 2


class JavaMissing(PipelineError):
    """Raised when no Java that Spark can use is found."""


class HistoryError(PipelineError):
    """Raised when a history cannot be read: a table or column is missing, it is empty, or its snapshot is gone."""


class LakeError(PipelineError):
    """Raised when a folder, file or manifest of a lake cannot be read or written; the text names it."""


class AlreadyCommitted(LakeError):
    """Raised when a lake already has a commit of that day and attempt, because another archiver was faster."""


class ArchiverBusy(PipelineError):
    """Raised when another archiver of the same database is running."""

    exit_code = 3
