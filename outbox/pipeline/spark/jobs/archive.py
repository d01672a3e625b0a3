"""
The archive as a job: `spark-submit outbox/pipeline/spark/jobs/archive.py --config archive.json`, or
`python -m outbox.pipeline.spark.jobs.archive`. Exit code: 0 done, 1 some days that are due were kept, 2 failed, 3 another
archiver is running.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from outbox.pipeline.spark import PipelineError, jobs
from outbox.pipeline.spark.archiver import ArchiveConfig, Archiver
from outbox.pipeline.spark.lake import Frame, Lake
from outbox.pipeline.spark.records import archive_lock

if TYPE_CHECKING:
    from outbox.pipeline.spark.readers import SparkWriter


class LazyWriter:
    """Imports and starts Spark when there is something to write: a run in which nothing is due needs neither PySpark nor Java."""

    def __init__(self, config: ArchiveConfig) -> None:
        self._config = config

    @cached_property
    def _writer(self) -> SparkWriter:
        from outbox.pipeline.spark.readers import SparkWriter  # see the class

        return SparkWriter(self._config, jobs.log)

    def write(self, frame: Frame, queries: Sequence[str], snapshot: str, folder: Path, row_bytes: int) -> None:
        """Write a frame, as `SparkWriter` does."""
        self._writer.write(frame, queries, snapshot, folder, row_bytes)

    def verify(self, frame: Frame, files: Sequence[Path]) -> tuple[int, str]:
        """Read files back, as `SparkWriter` does."""
        return self._writer.verify(frame, files)

    def close(self) -> None:
        """Stop Spark, if it was started."""
        if "_writer" in self.__dict__:
            self._writer.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Archive what is due. Return the exit code."""
    parser = ArgumentParser(description=__doc__)
    return jobs.main("Archive", parser, arguments, lambda options: run(ArchiveConfig.from_file(options.config)), wrong="kept")


def run(config: ArchiveConfig) -> dict[str, object]:
    """Archive what is due, while holding the database's archive lock. Raises PipelineError."""
    writer = LazyWriter(config)
    try:
        with archive_lock(config.pipeline.outbox.url) as connection:
            return Archiver(config, connection, Lake(Path(config.lake)), writer, jobs.log).run().as_dict()
    except psycopg.Error as error:
        raise PipelineError(f"The database failed: {str(error).strip()}. The next run goes on from there.") from error
    finally:
        writer.close()


if __name__ == "__main__":
    sys.exit(main())
