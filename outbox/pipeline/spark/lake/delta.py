"""
A lake whose frames are Delta tables as well: Spark writes Parquet, delta-rs writes Delta's log beside it, no jar is needed.

Manifests stay the truth. The log follows them, a commit at a time and each once: delta-rs takes an old application
transaction without a word (delta-io/delta-rs issue 3821), so it is asked first, by the one who holds the archiver's lock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction
from pyarrow import parquet

from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.lake.base import Commit, Written
from outbox.pipeline.spark.lake.frames import FRAMES, Frame
from outbox.pipeline.spark.lake.manifest import ManifestLake

PARTITIONS = ["day", "commit"]  # `commit`: the attempt; of a row that is there twice, the highest counts


@dataclass
class DeltaLake(ManifestLake):
    """A folder of Delta tables: `messages`, `inbox`, and the other frames."""

    def insist_on_writing(self) -> None:
        """Raise LakeError unless it can be written to. Adds to the log what an archiver that died left out."""
        super().insist_on_writing()
        self._follow()

    def commit(self, commit: Commit) -> None:
        """Make the files of a commit count, for good, and say so in Delta's log. Raises AlreadyCommitted, LakeError."""
        super().commit(commit)
        self._follow()

    def _follow(self) -> None:
        commits = self.committed()
        try:
            for name, frame in FRAMES.items():
                table = _table(self.root / name, frame)
                for commit in commits:
                    if name in commit.frames:
                        _add(self.root / name, table, commit, commit.frames[name])
        except (DeltaError, OSError) as error:
            raise LakeError(f"Delta's log in {self.root} cannot be written: {error}") from error


def _table(folder: Path, frame: Frame) -> Any:
    kinds = {"text": pa.string(), "int": pa.int64(), "time": pa.timestamp("us", tz="UTC"), "bytes": pa.binary()}
    columns = [*((column.name, kinds[column.kind]) for column in frame.columns), ("day", pa.date32()), ("commit", pa.int32())]
    folder.mkdir(parents=True, exist_ok=True)
    return DeltaTable.create(folder, pa.schema(columns), mode="ignore", partition_by=PARTITIONS)


def _add(folder: Path, table: Any, commit: Commit, written: Written) -> None:
    """Add these files to the log, unless it has them."""
    application = f"outbox-archive:{commit.day}"
    known = table.transaction_version(application)
    if known is not None and known >= commit.attempt:
        return
    actions = []
    for file, size in written.files.items():
        path = folder.parent / file
        stats = json.dumps({"numRecords": parquet.read_metadata(path).num_rows})
        values = {"day": commit.day, "commit": str(commit.attempt)}
        made = int(path.stat().st_mtime * 1000)
        actions.append(AddAction(str(path.relative_to(folder)), size, values, made, data_change=True, stats=stats))
    once = CommitProperties(app_transactions=[Transaction(application, commit.attempt)])
    table.create_write_transaction(actions, "append", table.schema(), partition_by=PARTITIONS, commit_properties=once)
    table.update_incremental()
