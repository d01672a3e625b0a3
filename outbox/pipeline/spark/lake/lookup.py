"""
Look up one message in a lake, for the admin: its day is in its id, and its row group in the statistics of the day's files.

    01a1ff7e-… -> 2026-11-19 -> newest commit with it -> one row group of messages/, those of inbox/ and of the logs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.lake.manifest import Commit, Lake

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class ArchivedMessage:
    """
    A message in the lake.

    Args:
        message: the columns of `frames.MESSAGES`.
        handled: its inbox rows by time, with the columns of `frames.INBOX`.
        commit: the name of the commit that contains it.
    """

    message: dict[str, Any]
    commit: str
    handled: list[dict[str, Any]] = field(default_factory=list)


def day_of(message_id: UUID) -> date:
    """Return the UTC day of a uuid7; the last possible day if the id contains no valid time."""
    try:
        return (EPOCH + timedelta(milliseconds=message_id.int >> 80)).date()
    except OverflowError:
        return date.max


def find_message(lake: Lake, message_id: UUID) -> ArchivedMessage | None:
    """
    Return a message by its id. None: the lake does not have it.

    Inbox rows are searched in the commits of its own day and of the day after.

    Raises:
        LakeError: the lake or a committed file cannot be read; or pyarrow is missing.
    """
    day = day_of(message_id)
    commits = lake.committed(str(day))
    for commit in reversed(commits):  # the latest attempt first
        for row in _rows(lake, commit, "messages", message_id):
            near = [*commits, *lake.committed(str(day + timedelta(days=1)))]
            handled = [row for day in near for row in _rows(lake, day, "inbox", message_id)]
            return ArchivedMessage(row, commit.name, sorted(handled, key=lambda row: row["handled_at"]))
    return None


def _rows(lake: Lake, commit: Commit, frame: str, message_id: UUID) -> Iterator[dict[str, Any]]:
    """Yield the rows of one message in a commit, from the row groups that may contain it."""
    try:
        # Here, since the admin imports this module and works without pyarrow, which is in the extra `lake`.
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise LakeError('pyarrow is missing: pip install "django-transactional-outbox[lake]"') from error
    lake.require_files(commit, frame)
    is_it = [("message_id", "=", str(message_id))]
    for file in commit.frames[frame].files:
        try:
            table = parquet.read_table(lake.root / file, filters=is_it, use_threads=False, page_checksum_verification=True)
            yield from table.to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise LakeError(f"The file {file} of {commit.name} in {lake.root} cannot be read: {error}") from error
