"""The archiver as a process, without Spark: `python -m tests.outbox.pipeline.spark.archive.archiver URL LAKE BEFORE`."""

import json
import sys
from datetime import date
from pathlib import Path

from outbox.pipeline.spark.archiver import ArchiveConfig, Archiver
from outbox.pipeline.spark.config import PipelineConfig, Source
from outbox.pipeline.spark.lake import Lake
from outbox.pipeline.spark.records import archive_lock
from tests.outbox.pipeline.spark.archive.arrow import ArrowWriter

if __name__ == "__main__":
    url, lake, before = sys.argv[1:]
    config = ArchiveConfig(PipelineConfig(Source(url)), lake, date.fromisoformat(before), rows_per_part=3)
    with archive_lock(url) as connection:
        done = Archiver(config, connection, Lake(Path(lake)), lambda: ArrowWriter(url)).run()
    sys.stdout.write(json.dumps(done.as_dict()))
