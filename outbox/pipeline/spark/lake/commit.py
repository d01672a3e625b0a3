"""A commit of the lake: the files of a day, and what they contain."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Written:
    """
    One frame of a day in the lake.

    Args:
        files: path relative to the lake -> size in bytes.
        digest: the sum of the rows' hashes; PostgreSQL calculates the same for the same rows.
    """

    rows: int
    digest: str
    files: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    """
    A commit of a day. A day has several commits if rows came into it after the first.

    Args:
        day: UTC, `2026-11-01`.
        attempt: identifies the commit among those of its day. If several contain a row, the highest attempt is valid.
        source: the source id of its database.
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
        """Return the content of the manifest."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Commit:
        """Return the commit of a manifest. Raises ValueError, TypeError or KeyError if it is not one."""
        raw = json.loads(text)
        raw["frames"] = {name: Written(**entry) for name, entry in raw["frames"].items()}
        return cls(**raw)
