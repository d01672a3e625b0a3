"""
Read the rows of a query in one snapshot, in parallel, over JDBC or by psycopg.

    SELECT part, … ; parts 1 to 1000; 4 connections -> part < 251 | < 501 | < 751 | others

psycopg needs no JDBC driver, and reads Unix sockets. It returns Arrow batches, which cost half as much as tuples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import psycopg
import pyarrow as pa
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from outbox.pipeline.spark.config import Source
from outbox.pipeline.spark.errors import HistoryError
from outbox.pipeline.spark.sources.snapshot import JOIN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


DRIVER = "org.postgresql.Driver"  # named, because Spark does not always find it by itself


def jdbc_url(url: str) -> tuple[str, dict[str, str]]:
    """
    Return the JDBC URL of a libpq URL, and user and password as options.

    Raises:
        HistoryError: the URL names a Unix socket, which the JDBC driver does not support.
    """
    parts = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    host = parts.get("host", "localhost")
    if host.startswith("/"):
        raise HistoryError(f'JDBC cannot use the Unix socket in {host}. Set reader="python", or connect to a host and port.')
    address = f"jdbc:postgresql://{host}:{parts.get('port', '5432')}/{quote(parts.get('dbname', 'postgres'), safe='')}"
    if "sslmode" in parts:
        address += f"?sslmode={parts['sslmode']}"
    return address, {"user": parts.get("user", "postgres"), "password": parts.get("password", "")}


def read_by_jdbc(spark: SparkSession, source: Source, query: str, bounds: tuple[int, int], snapshot: str) -> DataFrame:
    """
    Return the rows of a query within a snapshot, read in parallel by its column `part`.

    `source.fetch_rows` must be 1 or more: with 0 the driver reads in autocommit, outside of the snapshot.
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


# The rows of one part: from `low` up to, but not including, `high`. The first and last parts are open.
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


@dataclass
class KeyRange(InputPartition):
    low: int | None
    high: int | None


class PostgresSource(DataSource):
    """A data source with the options url, query, low, high, partitions, fetchrows and snapshot."""

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
        return [KeyRange(a, b) for a, b in zip([None, *cuts], [*cuts, None], strict=True)]

    def read(self, partition: KeyRange) -> Iterator[pa.RecordBatch]:
        schema = pa.schema([(column.name, ARROW[column.dataType.typeName()]) for column in self.schema])
        query = PART.format(columns=", ".join(self.schema.names), query=self.options["query"].replace("%", "%%"))
        with psycopg.connect(self.options["url"], application_name="outbox audit") as connection:
            connection.execute(JOIN.format(snapshot=self.options["snapshot"]))
            with connection.cursor(name="outbox_audit", binary=True) as cursor:
                cursor.execute(query, {"low": partition.low, "high": partition.high})
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
