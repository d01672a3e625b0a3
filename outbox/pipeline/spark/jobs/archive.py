"""
The archive as a job: `spark-submit outbox/pipeline/spark/jobs/archive.py --config archive.json`, or
`python -m outbox.pipeline.spark.jobs.archive`. Exit code: 0 done, 1 some days that are due were kept, 2 failed, 3 another
archiver is running.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from outbox.pipeline.spark.archive.config import ArchiveConfig
from outbox.pipeline.spark.archive.records import archive_lock
from outbox.pipeline.spark.archive.run import Archiver, ArchiveReport
from outbox.pipeline.spark.errors import BUSY, ArchiverBusy, PipelineError
from outbox.pipeline.spark.jobs import parent
from outbox.pipeline.spark.jobs.unexpected import describe
from outbox.pipeline.spark.lake.frames import Frame
from outbox.pipeline.spark.lake.manifest import Lake

if TYPE_CHECKING:
    from outbox.pipeline.spark.archive.spark import SparkWriter


class LazyWriter:
    """Imports and starts Spark when there is something to write: a run in which nothing is due needs neither PySpark nor Java."""

    def __init__(self, config: ArchiveConfig) -> None:
        self._config = config

    @cached_property
    def _writer(self) -> SparkWriter:
        from outbox.pipeline.spark.archive.spark import SparkWriter  # see the class

        return SparkWriter(self._config, _log)

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="JSON, as ArchiveConfig.to_json writes it")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there, as JSON (default: standard output)")
    parser.add_argument("--with-parent", action="store_true", help=parent.HELP)
    options = parser.parse_args(arguments)
    if options.with_parent:
        parent.exit_with_parent()
    try:
        done = run(ArchiveConfig.from_file(options.config))
        _write(json.dumps(done.as_dict()), options.output)
    except PipelineError as error:
        _log(f"Archive failed: {error}")
        return BUSY if isinstance(error, ArchiverBusy) else 2
    except KeyboardInterrupt:
        _log("Archive failed: it was interrupted. The next run goes on from there.")
        return 2
    except Exception as error:
        _log(f"Archive failed: {describe(error)}")
        return 2
    return int(bool(done.kept))


def run(config: ArchiveConfig) -> ArchiveReport:
    """Archive what is due, while holding the database's archive lock. Raises PipelineError."""
    writer = LazyWriter(config)
    try:
        with archive_lock(config.pipeline.outbox.url) as connection:
            lake = Lake(Path(config.lake))
            return Archiver(config, connection, lake, writer, _log).run()
    except psycopg.Error as error:
        raise PipelineError(f"The database failed: {str(error).strip()}. The next run goes on from there.") from error
    finally:
        writer.close()


def _write(text: str, output: Path | None) -> None:
    if output:
        output.write_text(f"{text}\n")
    else:
        sys.stdout.write(f"{text}\n")


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
