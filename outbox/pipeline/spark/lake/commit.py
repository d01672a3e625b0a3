"""What a commit of the lake says: which files of a day count, and what is in them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


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
