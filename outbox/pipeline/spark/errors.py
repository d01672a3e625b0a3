"""What can keep a job from giving an answer. Not of `outbox.errors`: that needs Django."""

from __future__ import annotations


class PipelineError(Exception):
    """Raised when a job cannot give an answer; the text says what to do. Never raised for what an audit finds."""


class JavaMissing(PipelineError):
    """Raised when no Java that Spark can use is found."""


class HistoryError(PipelineError):
    """Raised when a history cannot be read as it is: a table or column is missing, it is empty, its snapshot is gone."""


class LakeError(PipelineError):
    """Raised when a lake cannot be read or written as it is: a folder, a file or a manifest; the text names it."""


class AlreadyCommitted(LakeError):
    """Raised when a lake has a commit of that day and attempt: somebody else has archived meanwhile."""


BUSY = 3  # the exit code of a job that leaves its work to another one


class ArchiverBusy(PipelineError):
    """Raised when another archiver is at work on the same database."""
