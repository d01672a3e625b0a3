"""The configuration of the archive job, passed as JSON."""

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
        pipeline: the outbox's database, and how to run Spark.
        lake: the folder of this database's lake.
        before: archive days before this one.
        patience_seconds: how long to try to get the lock for dropping a day.
        rows_per_part: the approximate number of rows that a connection reads.
    """

    pipeline: PipelineConfig
    lake: str
    before: date
    patience_seconds: float = 10.0
    rows_per_part: int = 100_000

    def to_json(self) -> str:
        """Return the configuration as JSON, with passwords in URLs."""
        return json.dumps({**asdict(self), "pipeline": json.loads(self.pipeline.to_json()), "before": str(self.before)})

    @classmethod
    def from_file(cls, path: Path) -> ArchiveConfig:
        """
        Return the configuration that `to_json` has written.

        Raises:
            PipelineError: the file cannot be read, or is not such a configuration.
        """
        try:
            raw = json.loads(path.read_text())
            pipeline = PipelineConfig.from_json(json.dumps(raw.pop("pipeline")))
            return cls(pipeline=pipeline, **{**raw, "before": date.fromisoformat(raw["before"])})
        except (OSError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise PipelineError(f"The configuration {path} cannot be read: {type(error).__name__}: {error}") from error
