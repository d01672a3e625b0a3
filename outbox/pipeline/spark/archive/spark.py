"""
Write frames by Spark, and read them back: rows come by several connections, in one snapshot, sorted by message id.

pyspark is imported in the functions: an archive that has nothing to do needs neither it nor Java.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from outbox.pipeline.spark.archive.config import ArchiveConfig
from outbox.pipeline.spark.config import Source
from outbox.pipeline.spark.errors import HistoryError, LakeError
from outbox.pipeline.spark.lake.frames import HASH_DIGITS, NULL, SEPARATOR, Frame
from outbox.pipeline.spark.session import build_session

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

FETCH_BYTES = 16 * 1024 * 1024  # what a connection holds at once
ROW_GROUP_BYTES = 8 * 1024 * 1024  # what a look for one message reads at most

# Each page of a file has a checksum, and Spark reads on without a look at it: one flipped bit is another value.
HELD_TO_CHECKSUMS = {"parquet.page.verify-checksum.enabled": "true"}


class SparkWriter:
    """Starts Spark when there is something to write: a run without work needs no Java."""

    def __init__(self, config: ArchiveConfig, say: Callable[[str], None] = lambda text: None) -> None:
        self._config = config
        self._say = say

    @cached_property
    def spark(self) -> SparkSession:
        """The session; of this process, or made now."""
        self._say("starting Spark")
        return build_session(self._config.pipeline, name="outbox archive")

    def write(self, frame: Frame, queries: Sequence[str], snapshot: str, folder: Path, row_bytes: int) -> None:
        """
        Write the rows of these statements, one part each, into a folder that is not there yet.

        Args:
            row_bytes: no row is much larger; so many rows are fetched at once that a few large ones fit in memory.

        Raises:
            HistoryError: they cannot be read or written.
        """
        # Here: a run in which nothing is due starts no Spark, and does not wait for its import.
        from pyspark.errors import PySparkException

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
        Read files back; give how many rows they hold, and their digest.

        Raises:
            LakeError: one cannot be read.
        """
        # Here: a run in which nothing is due starts no Spark, and does not wait for its import.
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
        from pyspark.sql import functions as F

        rows = read_files(self.spark, frame, [str(file) for file in files])
        sums = rows.agg(F.count("*").alias("rows"), F.coalesce(F.sum(row_hash(frame)), F.lit(0)).alias("digest"))
        try:
            found = sums.collect()[0]
        except (PySparkException, Py4JError) as error:
            raise LakeError(
                f"What was written of {frame.name} cannot be read back: {unreadable_file(error) or error}. Nothing was "
                "committed, nothing deleted. Look at that disk, then archive again."
            ) from error
        return found.rows, str(found.digest)

    def close(self) -> None:
        """Stop Spark, if it was started."""
        if "spark" in self.__dict__:
            self.spark.stop()


def with_fetch_rows(source: Source, row_bytes: int) -> Source:
    """Limit how many rows a source fetches at once, so that they fit."""
    return replace(source, fetch_rows=max(1, min(source.fetch_rows, FETCH_BYTES // max(1, row_bytes))))


def read_rows(spark: SparkSession, source: Source, frame: Frame, query: str, snapshot: str) -> DataFrame:
    """Read a statement over one connection, within a snapshot."""
    schema = spark_schema(frame)
    query = f"SELECT 0 AS part, q.* FROM ({query}) q"  # noqa: S608  (a statement of ours)
    if source.reader == "python":
        # Here: a run in which nothing is due starts no Spark, and does not wait for its import.
        from outbox.pipeline.spark.sources import rows

        return rows.read(spark, source, query, (0, 0), snapshot, schema)
    # Here: a run in which nothing is due starts no Spark, and does not wait for its import.
    from pyspark.sql import functions as F

    from outbox.pipeline.spark.sources import jdbc

    found = jdbc.read(spark, source, query, (0, 0), snapshot)
    return found.select(*(F.col(column.name).cast(column.dataType) for column in schema))


def read_files(spark: SparkSession, frame: Frame, files: Sequence[str]) -> DataFrame:
    """Read files of a frame, each page held to its checksum; those of other writers may have none."""
    return spark.read.schema(spark_schema(frame)).options(**HELD_TO_CHECKSUMS).parquet(*files)


def unreadable_file(error: Exception) -> str:
    """Return the path of the file that an error of Spark is about; empty: it is about something else."""
    found = re.search(r"reading file (?:file:(?://)?)?(.+?)\.\s+SQLSTATE", str(error))
    return unquote(found[1]) if found else ""


def spark_schema(frame: Frame) -> StructType:
    """Return a frame's columns as Spark knows them."""
    # Here: a run in which nothing is due starts no Spark, and does not wait for its import.
    from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType

    kinds = {"text": StringType, "int": LongType, "time": TimestampType, "bytes": BinaryType}
    return StructType([StructField(column.name, kinds[column.kind]()) for column in frame.columns])


def row_hash(frame: Frame) -> Column:
    """Hash a row as `digest_query` has PostgreSQL do it."""
    # Here: a run in which nothing is due starts no Spark, and does not wait for its import.
    from pyspark.sql import functions as F

    parts = []
    for column in frame.columns:
        value = F.col(column.name)
        text = {"time": F.unix_micros, "bytes": F.md5}.get(column.kind, lambda same: same)(value)
        parts.append(F.coalesce(text.cast("string"), F.lit(NULL)))
    digits = F.substring(F.md5(F.concat_ws(SEPARATOR, *parts)), 1, HASH_DIGITS)
    return F.conv(digits, 16, 10).cast("decimal(20,0)")
