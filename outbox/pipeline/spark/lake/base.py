"""
What a lake owes: a commit is visible at once and as a whole, or not at all.

Files are written first, each attempt into a folder of its own; only a commit makes them count. So a writer that died leaves
files that nobody reads.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from outbox.pipeline.spark.errors import LakeError


@dataclass(frozen=True)
class Written:
    """
    One frame of a day, as it lies in the lake.

    Args:
        files: path, relative to the lake -> bytes.
        digest: sum over the rows' hashes; the database gives the same for the same rows.
    """

    rows: int
    digest: str
    files: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    """
    A day, or what came into it later.

    Args:
        day: UTC, `2026-11-01`.
        attempt: commits of a day are told apart by it. Of a row that stands in several, the latest one's counts.
        source: id of the database that it is from.
    """

    day: str
    attempt: int
    source: str
    frames: dict[str, Written]
    written_at: str = ""

    @property
    def name(self) -> str:
        return f"{self.day}.a{self.attempt}"

    def to_json(self) -> str:
        """Write it as a manifest."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Commit:
        """Read a manifest. Raises ValueError, TypeError or KeyError where it is none."""
        raw = json.loads(text)
        raw["frames"] = {name: Written(**entry) for name, entry in raw["frames"].items()}
        return cls(**raw)


class Lake(Protocol):
    """A folder of Parquet, and what says which of its files count."""

    root: Path

    def insist_on_writing(self) -> None:
        """Raise LakeError unless it can be written to."""

    def commit(self, commit: Commit) -> None:
        """Make the files of a commit count, for good. Raises AlreadyCommitted, LakeError."""

    def committed(self, day: str = "") -> list[Commit]:
        """Return all commits, or those of a day, oldest first. Raises LakeError where one cannot be read."""


def insist_on_files(lake: Lake, commit: Commit, *frames: str) -> None:
    """Raise LakeError unless the files of a commit are there in full; with `frames`, only those of these."""
    for name, written in commit.frames.items():
        for file, size in written.files.items() if not frames or name in frames else ():
            try:
                found = (lake.root / file).stat().st_size
            except OSError as error:
                raise LakeError(
                    f"The lake in {lake.root} has committed {commit.name}, and its file {file} cannot be read: {error.strerror}. "
                    "Bring it back from a copy of the lake."
                ) from error
            if found != size:
                raise LakeError(
                    f"The file {file} of {commit.name} in {lake.root} has {found} bytes instead of {size}. "
                    "Bring it back from a copy of the lake."
                )
