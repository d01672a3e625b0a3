"""
Read the rows of a query with Spark, within one snapshot and over several connections; and write and verify the lake's frames.

    SELECT part, … ; parts 1 to 1000; 4 connections -> part < 251 | < 501 | < 751 | others

Rows are read over JDBC or by psycopg, which needs no JDBC driver and can connect to a Unix socket. The psycopg reader passes
Arrow batches to Spark, which cost half as much as tuples. The archive imports this module only when there is something to write,
because it needs PySpark and Java.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode

import psycopg
import pyarrow as pa
from psycopg.conninfo import conninfo_to_dict
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType

from outbox.pipeline.spark import HistoryError, LakeError
from outbox.pipeline.spark.config import Source
from outbox.pipeline.spark.history import literally
from outbox.pipeline.spark.lake import HASH_DIGITS, NULL, SEPARATOR, Frame
from outbox.pipeline.spark.session import build_session
from outbox.pipeline.spark.statements import JOIN

if TYPE_CHECKING:
    from outbox.pipeline.spark.archiver import ArchiveConfig  # executors do not have what it imports


SAME_IN_JDBC = ("sslmode", "sslrootcert", "sslcert", "sslkey", "options")  # parameters with the same name and values in libpq
DRIVER = "org.postgresql.Driver"  # Spark does not always find it if it is not named


def jdbc_url(url: str) -> tuple[str, dict[str, str]]:
    """
    Return the JDBC URL for a libpq URL, and user and password as options.

    Raises:
        HistoryError: the URL names a Unix socket, which the JDBC driver does not support.
    """
    parameters = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    host = parameters.get("host", "localhost")
    if host.startswith("/"):
        raise HistoryError(f'JDBC cannot use the Unix socket in {host}. Set reader="python", or connect to a host and port.')
    address = f"jdbc:postgresql://{host}:{parameters.get('port', '5432')}/{quote(parameters.get('dbname', 'postgres'), safe='')}"
    if more := {name: parameters[name] for name in SAME_IN_JDBC if name in parameters}:
        address += f"?{urlencode(more, quote_via=quote)}"
    return address, {"user": parameters.get("user", "postgres"), "password": parameters.get("password", "")}


def read_by_jdbc(spark: SparkSession, source: Source, query: str, bounds: tuple[int, int], snapshot: str) -> DataFrame:
    """
    Return the rows of a query within a snapshot, read in parallel by its column `part`.

    `source.fetch_rows` must be 1 or more. With 0, the driver would read in autocommit, outside of the snapshot.
    """
    address, login = jdbc_url(source.url)
    low, high = bounds
    reader = (
        spark.read.format("jdbc")
        .options(url=address, driver=DRIVER, fetchsize=source.fetch_rows, dbtable=f"({query}) AS frame", **login)
        .option("sessionInitStatement", JOIN.format(snapshot=snapshot))
    )
    if high > low and source.partitions > 1:
        reader = reader.options(partitionColumn="part", lowerBound=low, upperBound=high + 1, numPartitions=source.partitions)
    return reader.load()


# The rows whose `part` is at least `low` and less than `high`. NULL: no bound, as below the first and above the last connection.
PART = """
SELECT {columns} FROM ({query}) AS frame
WHERE (%(low)s::bigint IS NULL OR part >= %(low)s) AND (%(high)s::bigint IS NULL OR part < %(high)s)
"""


ARROW = {
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}


class PostgresSource(DataSource):
    """A data source of Spark, with the options url, query, low, high, partitions, fetchrows and snapshot."""

    @classmethod
    def name(cls) -> str:
        return "outbox-postgres"

    def reader(self, schema: StructType) -> DataSourceReader:
        return PostgresReader(dict(self.options), schema)


class PostgresReader(DataSourceReader):
    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self.options = options
        self.schema = schema

    def partitions(self) -> list[InputPartition]:
        low, high, count = (int(self.options[name]) for name in ("low", "high", "partitions"))
        step = max(1, -(-(high - low + 1) // count))
        cuts = list(range(low + step, high + 1, step))
        return [InputPartition(bounds_of_part) for bounds_of_part in zip([None, *cuts], [*cuts, None], strict=True)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([(column.name, ARROW[column.dataType.typeName()]) for column in self.schema])
        query = PART.format(columns=", ".join(self.schema.names), query=self.options["query"].replace("%", "%%"))
        with psycopg.connect(self.options["url"], application_name="outbox audit") as connection:
            connection.execute(JOIN.format(snapshot=self.options["snapshot"]))
            with connection.cursor(name="outbox_audit", binary=True) as cursor:
                cursor.execute(query, dict(zip(("low", "high"), partition.value, strict=True)))
                while rows := cursor.fetchmany(int(self.options["fetchrows"])):
                    yield _batch(rows, schema)


def _batch(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def read_by_psycopg(
    spark: SparkSession, source: Source, query: str, bounds: tuple[int, int], snapshot: str, schema: StructType
) -> DataFrame:
    """Return the rows of a query within a snapshot, read in parallel by its column `part`, with the columns of `schema`."""
    spark.dataSource.register(PostgresSource)
    low, high = bounds
    options = {"low": low, "high": high, "partitions": source.partitions, "fetchrows": source.fetch_rows}
    return (
        spark.read.format("outbox-postgres")
        .schema(schema)
        .options(url=source.url, query=query, snapshot=snapshot, **{name: str(value) for name, value in options.items()})
        .load()
    )


FETCH_BYTES = 16 * 1024 * 1024  # the maximum size of the rows that a connection fetches at once
ROW_GROUP_BYTES = 8 * 1024 * 1024  # the look-up of a message reads a whole row group

# Each page of a file has a checksum. Spark does not verify it by default, so a flipped bit could be read as another value.
VERIFY_CHECKSUMS = {"parquet.page.verify-checksum.enabled": "true"}


class SparkWriter:
    """Writes and verifies frames of the lake. Spark is started when it is first needed."""

    def __init__(self, config: ArchiveConfig, log: Callable[[str], None] = lambda text: None) -> None:
        self._config = config
        self._log = log

    @cached_property
    def spark(self) -> SparkSession:
        """The Spark session of this process; it is started if there is none."""
        self._log("starting Spark")
        return build_session(self._config.pipeline, name="outbox archive")

    def write(self, frame: Frame, queries: Sequence[str], snapshot: str, folder: Path, row_bytes: int) -> None:
        """
        Write the rows of the given queries, one partition each, to a folder that does not exist yet.

        Args:
            row_bytes: the size of the largest row, which limits how many rows are fetched at once.

        Raises:
            HistoryError: the rows cannot be read or written.
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
    """Return the source with `fetch_rows` limited, so that it fetches about `FETCH_BYTES` at once at most."""
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
    """Return the rows of a frame's files. Page checksums are verified if the writer has added them."""
    return spark.read.schema(spark_schema(frame)).options(**VERIFY_CHECKSUMS).parquet(*map(literally, files))


def unreadable_file(error: Exception) -> str:
    """Return the path of the file that Spark could not read; "" if the error has another cause."""
    match = re.search(r"reading file (?:file:(?://)?)?(.+?)\.\s+SQLSTATE", str(error))
    return unquote(match[1]) if match else ""


def spark_schema(frame: Frame) -> StructType:
    """Return the schema of a frame for Spark."""
    kinds = {"text": StringType, "int": LongType, "time": TimestampType, "bytes": BinaryType}
    return StructType([StructField(column.name, kinds[column.kind]()) for column in frame.columns])


def row_hash(frame: Frame) -> Column:
    """Return the hash of a row; `lake.digest_query` calculates the same hash in PostgreSQL."""
    texts = []
    for column in frame.columns:
        value = F.col(column.name)
        text = {"time": F.unix_micros, "bytes": F.md5}.get(column.kind, lambda unchanged: unchanged)(value)
        texts.append(F.coalesce(text.cast("string"), F.lit(NULL)))
    digits = F.substring(F.md5(F.concat_ws(SEPARATOR, *texts)), 1, HASH_DIGITS)
    return F.conv(digits, 16, 10).cast("decimal(20,0)")
