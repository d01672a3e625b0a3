"""
Write frames with Spark, and read them back. Rows are read over several connections, in one snapshot, sorted by message id.

The archive job imports this module only when there is something to write, since it needs PySpark and Java.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path
from urllib.parse import unquote

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType

from outbox.pipeline.spark.archive.run import ArchiveConfig
from outbox.pipeline.spark.config import Source
from outbox.pipeline.spark.errors import HistoryError, LakeError
from outbox.pipeline.spark.lake.frames import HASH_DIGITS, NULL, SEPARATOR, Frame
from outbox.pipeline.spark.session import build_session
from outbox.pipeline.spark.sources.readers import read_by_jdbc, read_by_psycopg

FETCH_BYTES = 16 * 1024 * 1024  # fetched at once, per connection
ROW_GROUP_BYTES = 8 * 1024 * 1024  # a look-up of one message reads one row group

# Each page of a file has a checksum, which Spark ignores by default: a flipped bit would be read as another value.
VERIFY_CHECKSUMS = {"parquet.page.verify-checksum.enabled": "true"}


class SparkWriter:
    """Writes and verifies frames. Spark is started at its first use."""

    def __init__(self, config: ArchiveConfig, log: Callable[[str], None] = lambda text: None) -> None:
        self._config = config
        self._log = log

    @cached_property
    def spark(self) -> SparkSession:
        """The session: the running one of this process, or a new one."""
        self._log("starting Spark")
        return build_session(self._config.pipeline, name="outbox archive")

    def write(self, frame: Frame, queries: Sequence[str], snapshot: str, folder: Path, row_bytes: int) -> None:
        """
        Write the rows of the given queries, one partition each, to a folder that does not exist yet.

        Args:
            row_bytes: the size of the largest row, which limits how many rows are fetched at once.

        Raises:
            HistoryError: they cannot be read or written.
        """
        try:
            source = with_fetch_rows(self._config.pipeline.outbox, row_bytes)
            parts = [read_rows(self.spark, source, frame, query, snapshot) for query in queries]
            rows = reduce(lambda left, right: left.unionAll(right), parts)
            rows = rows.sortWithinPartitions("message_id") if frame.id else rows
            options = {"compression": "zstd", "parquet.block.size": str(ROW_GROUP_BYTES)}
            rows.write.options(**options).option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(str(folder))
        except PySparkException as error:
            raise HistoryError(f"The frame {frame.name!r} cannot be written to {folder}: {str(error).splitlines()[0]}") from error

    def verify(self, frame: Frame, files: Sequence[Path]) -> tuple[int, str]:
        """
        Read files back. Return the number of their rows, and their digest.

        Raises:
            LakeError: a file cannot be read.
        """
        rows = read_files(self.spark, frame, [str(file) for file in files])
        sums = rows.agg(F.count("*").alias("rows"), F.coalesce(F.sum(row_hash(frame)), F.lit(0)).alias("digest"))
        try:
            row = sums.collect()[0]
        except (PySparkException, Py4JError) as error:
            raise LakeError(
                f"The files of {frame.name} cannot be read back: {unreadable_file(error) or error}. Nothing was committed or "
                "deleted. Check the disk, then archive again."
            ) from error
        return row.rows, str(row.digest)

    def close(self) -> None:
        """Stop Spark, if it was started."""
        if "spark" in self.__dict__:
            self.spark.stop()


def with_fetch_rows(source: Source, row_bytes: int) -> Source:
    """Return a source that fetches at most `FETCH_BYTES` at once."""
    return replace(source, fetch_rows=max(1, min(source.fetch_rows, FETCH_BYTES // max(1, row_bytes))))


def read_rows(spark: SparkSession, source: Source, frame: Frame, query: str, snapshot: str) -> DataFrame:
    """Return the rows of a query, read over one connection within a snapshot."""
    schema = spark_schema(frame)
    query = f"SELECT 0 AS part, q.* FROM ({query}) q"  # noqa: S608  (a statement of ours)
    if source.reader == "python":
        return read_by_psycopg(spark, source, query, (0, 0), snapshot, schema)
    by_jdbc = read_by_jdbc(spark, source, query, (0, 0), snapshot)
    return by_jdbc.select(*(F.col(column.name).cast(column.dataType) for column in schema))


def read_files(spark: SparkSession, frame: Frame, files: Sequence[str]) -> DataFrame:
    """Return the rows of a frame's files, with verification of page checksums where the writer has added them."""
    return spark.read.schema(spark_schema(frame)).options(**VERIFY_CHECKSUMS).parquet(*files)


def unreadable_file(error: Exception) -> str:
    """Return the path of the file that Spark could not read; "" if the error has another cause."""
    match = re.search(r"reading file (?:file:(?://)?)?(.+?)\.\s+SQLSTATE", str(error))
    return unquote(match[1]) if match else ""


def spark_schema(frame: Frame) -> StructType:
    """Return a frame's schema in Spark."""
    kinds = {"text": StringType, "int": LongType, "time": TimestampType, "bytes": BinaryType}
    return StructType([StructField(column.name, kinds[column.kind]()) for column in frame.columns])


def row_hash(frame: Frame) -> Column:
    """Return the hash of a row; `digest_query` calculates the same in PostgreSQL."""
    parts = []
    for column in frame.columns:
        value = F.col(column.name)
        text = {"time": F.unix_micros, "bytes": F.md5}.get(column.kind, lambda same: same)(value)
        parts.append(F.coalesce(text.cast("string"), F.lit(NULL)))
    digits = F.substring(F.md5(F.concat_ws(SEPARATOR, *parts)), 1, HASH_DIGITS)
    return F.conv(digits, 16, 10).cast("decimal(20,0)")
