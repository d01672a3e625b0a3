"""
One pass over frames of a history with NumPy on Arrow batches, distributed over Spark's tasks.

Workers open the Parquet files themselves. Spark's reader would convert columns to rows, and rows to columns again for Python:
seven times the CPU for seven columns. It is used only for frames that are not in files, or in files that pyarrow cannot open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from outbox.pipeline.spark.history import MESSAGE_FRAMES, History, opened

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Batches = Iterator[pa.RecordBatch]
Work = Callable[[str, Batches], Batches]

ROWS = 131_072  # per batch
PARTS = 4  # per file; each has some of its row groups

FOOTERS_AT_ONCE = 16  # read concurrently by the driver

SPARK_TYPES = {
    pa.string(): "string",
    pa.binary(): "binary",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.list_(pa.string()): "array<string>",
}

# Columns with few distinct values, which are read as dictionaries.
CODED = ["source", "topic", "state", "consumer_group", "outcome", "tag", "subject", "type"]


def scan(
    spark: SparkSession,
    history: History,
    columns: Mapping[str, Sequence[str]],
    work: Work,
    schema: pa.Schema,
    *,
    where_null: str = "",
) -> DataFrame:
    """
    Call a function for each part of each frame, and return its results.

    Args:
        columns: frame -> the columns to read.
        work: called with a frame's name and batches of some of its rows; yields batches of `schema`.
        where_null: only rows with NULL in this column are needed; others may be passed all the same.
    """
    files, found = [], []
    for name, wanted in columns.items():
        if name in history.files:
            files += [(name, file) for file in history.files[name]]
        else:
            found.append(history.frames[name].select(*wanted).mapInArrow(partial(work, name), ddl(schema)))
    if files:
        parts = [(*file, part) for part in range(PARTS) for file in files]  # parts of one file go to different tasks
        many = min(len(parts), int(spark.conf.get("spark.sql.shuffle.partitions")))  # each task costs 80 ms of CPU
        columns_of_parts = zip(*parts, strict=True)
        tasks = spark.createDataFrame(pa.table([*map(pa.array, columns_of_parts)], ["frame", "file", "part"])).repartition(many)
        found.append(tasks.mapInArrow(_reader(FileReader(columns, history.first_id, where_null), work), ddl(schema)))
    return reduce(DataFrame.unionAll, found)


def may_have_null(history: History, frames: Iterable[str], column: str) -> bool:
    """Return whether rows of these frames may have NULL in a column, by the statistics of their files."""
    if any(name not in history.files for name in frames):
        return True
    files = [file for name in frames for file in history.files[name]]
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        return any(pool.map(partial(_file_may_have_null, column), files))


def _file_may_have_null(column: str, file: str) -> bool:
    try:
        with opened(file) as source:
            metadata = pq.read_metadata(source)
    except (OSError, pa.ArrowException):
        return True  # the error will be reported when its rows are read
    return any(_may_have_null(metadata, group, column) for group in range(metadata.num_row_groups))


def _may_have_null(metadata: Any, group: int, column: str) -> bool:
    rows = metadata.row_group(group)
    about = rows.column(metadata.schema.to_arrow_schema().get_field_index(column)).statistics
    return bool(rows.num_rows) and (about is None or about.null_count != 0)  # None: the writer did not count


def ddl(schema: pa.Schema) -> str:
    """Return a schema in Spark's DDL."""
    return ", ".join(f"{column.name} {SPARK_TYPES[column.type]}" for column in schema)


@dataclass(frozen=True)
class FileReader:
    """Reads parts of a history's files. first_id: skip messages with lower ids; where_null: as in `scan`."""

    columns: Mapping[str, Sequence[str]]
    first_id: str = ""
    where_null: str = ""

    def batches(self, frame: str, file: str, part: int) -> Batches:
        """Yield the batches of a part of a file."""
        columns = list(self.columns[frame])
        first_id = self.first_id if frame in MESSAGE_FRAMES else ""
        if first_id and "message_id" not in columns:
            columns.append("message_id")
        codes = [name for name in CODED if name in columns]
        with opened(file) as source, pq.ParquetFile(source, read_dictionary=codes) as parquet:
            groups = self._groups(parquet.metadata, part)
            for batch in parquet.iter_batches(ROWS, row_groups=groups, columns=columns, use_threads=False):
                yield batch.filter(pc.greater_equal(batch.column("message_id"), first_id)) if first_id else batch

    def _groups(self, metadata: Any, part: int) -> list[int]:
        many = metadata.num_row_groups
        mine = list(range(part * many // PARTS, (part + 1) * many // PARTS))
        return [group for group in mine if not self.where_null or _may_have_null(metadata, group, self.where_null)]


def _reader(reader: FileReader, work: Work) -> Any:
    def read(parts: Batches) -> Batches:
        for batch in parts:
            for part in batch.to_pylist():
                yield from work(part["frame"], reader.batches(**part))

    return read
