"""What the archiving job is told; it travels as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.errors import PipelineError


@dataclass(frozen=True)
class ArchiveConfig:
    """
    Args:
        pipeline: where the outbox lies, and how Spark runs.
        lake: the folder of this database's lake.
        before: days before this one are archived.
        patience_seconds: how long to try for the lock that dropping a day needs.
        rows_per_part: a connection reads about so many rows of a frame.
    """

    pipeline: PipelineConfig
    lake: str
    before: date
    patience_seconds: float = 10.0
    rows_per_part: int = 100_000

    def to_json(self) -> str:
        """Write everything; passwords in URLs included."""
        return json.dumps({**asdict(self), "pipeline": json.loads(self.pipeline.to_json()), "before": str(self.before)})

    @classmethod
    def from_file(cls, path: Path) -> ArchiveConfig:
        """
        Read what `to_json` wrote.

        Raises:
            PipelineError: it cannot be read, or is none.
        """
        try:
            raw = json.loads(path.read_text())
            pipeline = PipelineConfig.from_json(json.dumps(raw.pop("pipeline")))
            return cls(pipeline=pipeline, **{**raw, "before": date.fromisoformat(raw["before"])})
        except (OSError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise PipelineError(f"The configuration {path} cannot be read: {type(error).__name__}: {error}") from error
