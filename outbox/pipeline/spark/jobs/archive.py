"""
The archive as a job: `spark-submit --py-files outbox.zip outbox/pipeline/spark/jobs/archive.py --config archive.json`, or by
`python -m outbox.pipeline.spark.jobs.archive`. Exit code: 0 done, 1 days are left that are due, 2 nothing could be done, 3
another archiver is at work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import psycopg

from outbox.pipeline.spark.archive.book import turn
from outbox.pipeline.spark.archive.config import ArchiveConfig
from outbox.pipeline.spark.archive.run import Archived, Archiver
from outbox.pipeline.spark.archive.spark import SparkWriter
from outbox.pipeline.spark.errors import BUSY, ArchiverBusy, PipelineError
from outbox.pipeline.spark.jobs import parent
from outbox.pipeline.spark.jobs.end import describe
from outbox.pipeline.spark.lake.manifest import Lake


def main(arguments: Sequence[str] | None = None) -> int:
    """Archive as the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="JSON, as ArchiveConfig.to_json writes it")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report there, as JSON (default: standard output)")
    parser.add_argument("--with-parent", action="store_true", help=parent.HELP)
    options = parser.parse_args(arguments)
    if options.with_parent:
        parent.end_with_it()
    try:
        done = run(ArchiveConfig.from_file(options.config))
        _write(json.dumps(done.as_dict()), options.output)
    except PipelineError as error:
        _say(f"Nothing more could be done: {error}")
        return BUSY if isinstance(error, ArchiverBusy) else 2
    except KeyboardInterrupt:
        _say("Nothing more could be done: it was interrupted. The next run goes on from there.")
        return 2
    except Exception as error:
        _say(f"Nothing more could be done: {describe(error)}")
        return 2
    return int(bool(done.kept))


def run(config: ArchiveConfig) -> Archived:
    """Archive what is due, alone in that database. Raises PipelineError."""
    writer = SparkWriter(config, _say)
    try:
        with turn(config.pipeline.outbox.url) as connection:
            lake = Lake(Path(config.lake))
            return Archiver(config, connection, lake, writer, _say).run()
    except psycopg.Error as error:
        raise PipelineError(f"The database failed: {str(error).strip()}. The next run goes on from there.") from error
    finally:
        writer.close()


def _write(text: str, output: Path | None) -> None:
    if output:
        output.write_text(f"{text}\n")
    else:
        sys.stdout.write(f"{text}\n")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
