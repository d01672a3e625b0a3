"""PostgreSQL by JDBC: several connections read one statement, all in one snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from outbox.pipeline.spark.config import Source
from outbox.pipeline.spark.errors import HistoryError
from outbox.pipeline.spark.sources.snapshot import JOIN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DRIVER = "org.postgresql.Driver"  # without it, Spark has failed to find the driver


def jdbc_url(url: str) -> tuple[str, dict[str, str]]:
    """
    Turn libpq's URL into JDBC's, and user and password.

    Raises:
        HistoryError: the server is reached by a socket file, which Java does not do.
    """
    # Here: a node of a cluster that only reads files has no libpq, without which psycopg cannot be imported.
    from psycopg.conninfo import conninfo_to_dict

    parts = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    host = parts.get("host", "localhost")
    if host.startswith("/"):
        raise HistoryError(f'JDBC cannot use the socket in {host}. Read with reader="python", or name a host and port.')
    address = f"jdbc:postgresql://{host}:{parts.get('port', '5432')}/{quote(parts.get('dbname', 'postgres'), safe='')}"
    if "sslmode" in parts:
        address += f"?sslmode={parts['sslmode']}"
    return address, {"user": parts.get("user", "postgres"), "password": parts.get("password", "")}


def read(spark: SparkSession, source: Source, query: str, bounds: tuple[int, int], snapshot: str) -> DataFrame:
    """
    Read a statement within a snapshot, in parts by its column `part`.

    `source.fetch_rows` is 1 or more: with 0 the driver reads in autocommit, and each part sees another moment.
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
