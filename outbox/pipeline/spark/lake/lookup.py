"""One message out of the lake, without Spark: its id says its day, and files are sorted by id, so little is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.lake.commit import Commit
from outbox.pipeline.spark.lake.manifest import Lake

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Found:
    """
    A message in the lake.

    Args:
        message: the columns of `frames.MESSAGES`.
        handled: rows of the inbox, the columns of `frames.INBOX`, by time.
        commit: which commit has it.
    """

    message: dict[str, Any]
    commit: str
    handled: list[dict[str, Any]] = field(default_factory=list)


def day_of(message_id: UUID) -> date:
    """Return the UTC day that a uuid7 names; the last there is for one that names none."""
    try:
        return (EPOCH + timedelta(milliseconds=message_id.int >> 80)).date()
    except OverflowError:
        return date.max


def find_message(lake: Lake, message_id: UUID) -> Found | None:
    """
    Find a message by its id; None: the lake does not have it.

    Who handled it is looked for on its own day and the day after.

    Raises:
        LakeError: the lake, or a file that counts, cannot be read; or pyarrow is missing.
    """
    day = day_of(message_id)
    commits = lake.committed(str(day))
    for commit in reversed(commits):  # the latest one first
        for row in _rows(lake, commit, "messages", message_id):
            near = [*commits, *lake.committed(str(day + timedelta(days=1)))]
            handled = [row for one in near for row in _rows(lake, one, "inbox", message_id)]
            return Found(row, commit.name, sorted(handled, key=lambda row: row["handled_at"]))
    return None


def _rows(lake: Lake, commit: Commit, frame: str, message_id: UUID) -> Iterator[dict[str, Any]]:
    """Read the rows of one message from the row groups that may hold it."""
    try:
        # In here: the admin works without the extra `lake`.
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise LakeError('pyarrow is missing: pip install "django-transactional-outbox[lake]"') from error
    lake.require_files(commit, frame)
    for file in commit.frames[frame].files:
        try:
            is_it = [("message_id", "=", str(message_id))]
            found = parquet.read_table(lake.root / file, filters=is_it, use_threads=False, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise LakeError(f"The file {file} of {commit.name} in {lake.root} cannot be read: {error}") from error
        yield from found.to_pylist()
