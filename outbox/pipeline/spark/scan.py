"""
Scan frames of a history (`history.py`) with NumPy on Arrow batches, distributed over Spark's tasks.

    topic: ["orders", "orders", "bills"]  ->  Coded(codes=[0, 0, 1], values=["orders", "bills", None])  ->  work  ->  rows

Workers open the Parquet files themselves. Spark's reader would convert columns to rows, and then rows to columns for Python,
which takes seven times the CPU for seven columns. It is used only for frames that are not in files, or in files that pyarrow
cannot open.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from outbox.pipeline.spark.history import MESSAGE_FRAMES, History, open_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Ints: TypeAlias = "npt.NDArray[np.int64]"
Bools: TypeAlias = "npt.NDArray[np.bool_]"

# A uuid7 as text begins with 12 hexadecimal digits of milliseconds, with a hyphen after the first 8.
UUID_LENGTH = 36
TIME_DIGITS = (0, 2, 4, 6, 9, 11)  # the indexes at which pairs of these digits begin
VERSION_DIGIT = 14
HEXADECIMAL: Ints = np.full(1 << 16, -1, np.int64)  # two digits, read as a little-endian number -> their value, or -1
HEXADECIMAL[np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), "<u2")] = range(256)


MAX_COUNT_TABLE = 1 << 20  # filling a larger table of counts costs more than sorting the rows of a batch
MAX_LOOKUP_TABLE = 1 << 16  # a lookup table up to this size fits into a core's cache, and is faster than a hash table


@dataclass(frozen=True)
class Coded:
    """A dictionary-encoded column of strings. The value of a row is values[codes[row]]; the last value is None, for NULL."""

    codes: npt.NDArray[np.int32]
    values: list[str | None]

    def each(self, function: Callable[[Any], Any], kind: Any = np.int64) -> npt.NDArray[Any]:
        """Return the result of a function for each row. It is called once for each distinct value."""
        return np.array([function(value) for value in self.values], kind)[self.codes]

    def is_(self, *wanted: str) -> Bools:
        """Return for each row whether its value is one of these."""
        return self.each(wanted.__contains__, np.bool_)

    def of(self, rows: Bools) -> Coded:
        """Return the column with these rows only."""
        return Coded(self.codes[rows], self.values)


def coded(batch: pa.RecordBatch, name: str) -> Coded:
    column = batch.column(name)
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    values = [*column.dictionary.to_pylist(), None]
    return Coded(_filled(column.indices, len(values) - 1), values)


def constant(value: str, rows: int) -> Coded:
    """Return a column with the same value in each row."""
    return Coded(np.zeros(rows, np.int32), [value, None])


def integers(batch: pa.RecordBatch, name: str) -> tuple[Ints, Bools]:
    """Return the numbers of a column, 0 for NULL, and for each row whether it has one."""
    column = batch.column(name)
    return _filled(column.cast(pa.int64()), 0), _is_valid(column)


def times_of(batch: pa.RecordBatch, name: str) -> tuple[Ints, Bools]:
    """Return the times of a column in microseconds since 1970, 0 for NULL, and for each row whether it has one."""
    times = batch.column(name).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    return _filled(times, 0), _is_valid(times)


def micros_of(batch: pa.RecordBatch, *names: str, missing: int = 0) -> Ints:
    """Return the first time in these columns that is not NULL, in microseconds since 1970; `missing` if all are NULL."""
    values: Ints = np.full(batch.num_rows, missing, np.int64)
    for name in reversed(names):
        times, has_one = times_of(batch, name)
        values = times if has_one.all() else np.where(has_one, times, values)
    return values


def _filled(column: pa.Array, value: int) -> Any:
    return (column.fill_null(value) if column.null_count else column).to_numpy(zero_copy_only=False)


def _is_valid(column: pa.Array) -> Bools:
    return column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else np.ones(len(column), bool)


def distinct(codes: Ints) -> tuple[Ints, Ints]:
    """Return the distinct integers, and the index of each row's integer among them."""
    if not len(codes):
        return codes, codes
    low = int(codes.min())
    span = int(codes.max()) - low + 1
    if span > MAX_LOOKUP_TABLE:
        encoded = pa.array(codes).dictionary_encode()
        return encoded.dictionary.to_numpy(), encoded.indices.to_numpy().astype(np.int64)
    shifted = codes - low
    present = np.flatnonzero(np.bincount(shifted))
    index_of: Ints = np.zeros(span, np.int64)
    index_of[present] = np.arange(len(present))
    return present + low, index_of[shifted]


def published_micros(batch: pa.RecordBatch) -> tuple[Ints, Bools]:
    """Return the times in message ids in microseconds since 1970, 0 if an id is no uuid7; and for each row whether it is one."""
    ids = batch.column("message_id").cast(pa.string())
    is_uuid = pc.equal(pc.binary_length(ids), UUID_LENGTH).fill_null(False).to_numpy(zero_copy_only=False)
    if not is_uuid.all():
        ids = ids.take(np.flatnonzero(is_uuid))
    offsets, letters = (np.frombuffer(ids.buffers()[part] or b"", kind) for part, kind in ((1, np.int32), (2, np.uint8)))
    start = offsets[ids.offset] if len(ids) else 0
    rows = letters[start : start + UUID_LENGTH * len(ids)].reshape(-1, UUID_LENGTH)
    millis: Ints = np.zeros(len(ids), np.int64)
    signs: Ints = np.zeros(len(ids), np.int64)
    for index in TIME_DIGITS:
        digits = HEXADECIMAL[rows[:, index : index + 2].view("<u2")[:, 0]]
        millis = (millis << 8) + digits
        signs |= digits
    is_seven = (rows[:, VERSION_DIGIT] == ord("7")) & (signs >= 0)
    micros: Ints = np.zeros(len(batch), np.int64)
    has_one: Bools = np.zeros(len(batch), bool)
    micros[is_uuid], has_one[is_uuid] = np.where(is_seven, millis * 1000, 0), is_seven
    return micros, has_one


class RowCounter:
    """
    Counts rows that have the same texts and numbers.

    Args:
        schema: the columns of the texts, then those of the numbers, then the count.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._counts: list[pa.RecordBatch] = []

    def add(self, texts: Sequence[Coded], numbers: Sequence[Ints]) -> None:
        """Count the rows of a batch. Raises ValueError if texts and numbers have too many combinations for one integer."""
        if not len(numbers[0]):
            return
        lowest = [int(number.min()) for number in numbers]
        spans = [int(number.max()) - low + 1 for number, low in zip(numbers, lowest, strict=True)]
        shape = [*(len(text.values) for text in texts), *spans]
        shifted = [number - low for number, low in zip(numbers, lowest, strict=True)]
        rows = np.ravel_multi_index([*(text.codes for text in texts), *shifted], shape)
        if math.prod(shape) > MAX_COUNT_TABLE:
            keys, row_counts = np.unique(rows, return_counts=True)
        else:
            counts = np.bincount(rows)
            keys = np.flatnonzero(counts)
            row_counts = counts[keys]
        indexes = np.unravel_index(keys, shape)
        names = [pa.array(text.values, pa.string()).take(index) for text, index in zip(texts, indexes, strict=False)]
        counted = [index + low for index, low in zip(indexes[len(texts) :], lowest, strict=True)]
        columns = [
            pa.array(column, kind) for column, kind in zip([*names, *counted, row_counts], self._schema.types, strict=True)
        ]
        self._counts.append(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the counts of all batches."""
        *keys, n = self._schema.names
        counts = pa.Table.from_batches(self._counts, self._schema).group_by(keys).aggregate([(n, "sum")])
        yield from counts.select([*keys, f"{n}_sum"]).rename_columns(self._schema.names).to_batches()


Batches = Iterator[pa.RecordBatch]
Work = Callable[[str, Batches], Batches]

ROWS_PER_BATCH = 131_072
PARTS_PER_FILE = 4  # each part has some of the file's row groups

FOOTERS_AT_ONCE = 16  # the number of Parquet footers that the driver reads concurrently

SPARK_TYPES = {
    pa.string(): "string",
    pa.binary(): "binary",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.list_(pa.string()): "array<string>",
}

# The columns with few distinct values, which are read dictionary-encoded.
DICTIONARY_COLUMNS = ["source", "topic", "state", "consumer_group", "outcome", "tag", "subject", "type"]


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
    Call a function for some frames, once for each part of a file, and return its results as one frame.

    Args:
        columns: frame -> the columns to read.
        work: called with a frame's name and batches of some of its rows; yields batches of `schema`.
        where_null: a column; row groups without NULL in it are skipped, since rows that have a value there are not needed.
    """
    files, results = [], []
    for name, wanted in columns.items():
        if name in history.files:
            files += [(name, file) for file in history.files[name]]
        else:
            results.append(history.frames[name].select(*wanted).mapInArrow(partial(work, name), ddl(schema)))
    if files:
        parts = [(*file, part) for part in range(PARTS_PER_FILE) for file in files]  # parts of one file go to different tasks
        task_count = min(len(parts), int(spark.conf.get("spark.sql.shuffle.partitions")))  # each task costs 80 ms of CPU
        columns_of_parts = zip(*parts, strict=True)
        tasks = spark.createDataFrame(pa.table([*map(pa.array, columns_of_parts)], ["frame", "file", "part"])).repartition(
            task_count
        )
        results.append(tasks.mapInArrow(_reader(partial(read_part, columns, history.first_id, where_null), work), ddl(schema)))
    return reduce(DataFrame.unionAll, results)


def collected(frame: DataFrame) -> list[Any]:
    """Return the rows of a frame as named tuples, whose fields cost a tenth of the CPU of those of Spark's rows."""
    table = frame.toArrow()
    return list(map(namedtuple("Collected", table.column_names), *(column.to_pylist() for column in table.itercolumns())))


def may_have_null(history: History, frames: Iterable[str], column: str) -> bool:
    """Return whether rows of these frames may have NULL in a column, according to the statistics of their files."""
    if any(name not in history.files for name in frames):
        return True
    files = [file for name in frames for file in history.files[name]]
    with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
        return any(pool.map(partial(_file_may_have_null, column), files))


def _file_may_have_null(column: str, file: str) -> bool:
    try:
        with open_file(file) as source:
            metadata = pq.read_metadata(source)
    except (OSError, pa.ArrowException):
        return True  # reading its rows will report the error
    return any(_may_have_null(metadata, group, column) for group in range(metadata.num_row_groups))


def _may_have_null(metadata: Any, group: int, column: str) -> bool:
    rows = metadata.row_group(group)
    statistics = rows.column(metadata.schema.to_arrow_schema().get_field_index(column)).statistics
    return bool(rows.num_rows) and (statistics is None or statistics.null_count != 0)  # None: the writer did not count


def ddl(schema: pa.Schema) -> str:
    """Return a schema as a DDL string of Spark."""
    return ", ".join(f"{column.name} {SPARK_TYPES[column.type]}" for column in schema)


def read_part(
    columns: Mapping[str, Sequence[str]], first_id: str, where_null: str, *, frame: str, file: str, part: int
) -> Batches:
    """
    Yield the batches of one of `PARTS_PER_FILE` parts of a history's file.

    Args:
        columns, where_null: as in `scan`.
        first_id: skip messages with lower ids.
    """
    wanted_columns = list(columns[frame])
    first_id = first_id if frame in MESSAGE_FRAMES else ""
    if first_id and "message_id" not in wanted_columns:
        wanted_columns.append("message_id")
    encoded = [name for name in DICTIONARY_COLUMNS if name in wanted_columns]
    with open_file(file) as source, pq.ParquetFile(source, read_dictionary=encoded) as parquet:
        count = parquet.metadata.num_row_groups
        groups_of_part = range(part * count // PARTS_PER_FILE, (part + 1) * count // PARTS_PER_FILE)
        groups = [group for group in groups_of_part if not where_null or _may_have_null(parquet.metadata, group, where_null)]
        for batch in parquet.iter_batches(ROWS_PER_BATCH, row_groups=groups, columns=wanted_columns, use_threads=False):
            yield batch.filter(pc.greater_equal(batch.column("message_id"), first_id)) if first_id else batch


def _reader(read_part: Callable[..., Batches], work: Work) -> Any:
    """Return a function for `mapInArrow` that reads the parts of files that its rows name, and calls `work` with each part."""

    def read(parts: Batches) -> Batches:
        for batch in parts:
            for part in batch.to_pylist():
                yield from work(part["frame"], read_part(**part))

    return read
