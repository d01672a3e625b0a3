"""What can keep a job from giving an answer. Not of `outbox.errors`: that needs Django."""

from __future__ import annotations


class PipelineError(Exception):
    """Raised when a job cannot give an answer; the text says what to do. Never raised for what an audit finds."""


class JavaMissing(PipelineError):
    """Raised when no Java that Spark can use is found."""


class HistoryError(PipelineError):
    """Raised when a history cannot be read as it is: a table or column is missing, it is empty, its snapshot is gone."""
