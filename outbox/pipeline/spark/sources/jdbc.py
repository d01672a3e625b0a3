"""Read PostgreSQL with JDBC: several connections read one query, all in one snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict

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


def read(spark: SparkSession, source: Source, query: str, bounds: tuple[int, int], snapshot: str) -> DataFrame:
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
