"""The stream of what was written since: a Python data source over psycopg, in Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import LongType, ShortType, StringType, StructField, StructType

from outbox.database.locks import END_IDLE_SNAPSHOT
from outbox.pipeline.spark.monitor import statements
from outbox.pipeline.spark.monitor.offsets import MEASURE, Offset, advance

NAME = "outbox-changes"

CHANGES = StructType(
    [
        *(StructField(name, StringType()) for name in ("role", "consumer_group", "source", "topic")),
        StructField("lane", ShortType()),
        StructField("number", LongType()),
    ]
)
ARROW = pa.schema(
    [
        *((name, pa.string()) for name in ("role", "consumer_group", "source", "topic")),
        ("lane", pa.int16()),
        ("number", pa.int64()),
    ]
)


@dataclass
class Window(InputPartition):
    """Rows of one table that transactions from `low` up to, not including, `high` have written."""

    table: str
    low: int
    high: int
    oldest: datetime | None


class ChangesSource(DataSource):
    """Options, in lower case: url, fetchrows."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return CHANGES

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return ChangesReader(dict(self.options))


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: dict[str, str]) -> None:
        self.options = options
        self._end: tuple[int, int, datetime] | None = None

    def initialOffset(self) -> dict[str, Any]:
        return Offset().as_dict()

    def prepareForTriggerAvailableNow(self) -> None:
        """Read no further than to here."""
        self._end = self._measure()

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return advance(Offset.of(start), *(self._end or self._measure())).as_dict()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        low, high = Offset.of(start), Offset.of(end)
        return [Window(table, low.horizon, high.horizon, low.oldest) for table in statements.ALL]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Window)
        values = {"low": partition.low, "high": partition.high, "oldest": partition.oldest}
        with (
            psycopg.connect(self.options["url"], application_name="outbox monitor") as connection,
            connection.cursor(name="outbox_monitor", binary=True) as cursor,
        ):
            connection.execute(END_IDLE_SNAPSHOT)
            cursor.execute(statements.ALL[partition.table], values)
            while rows := cursor.fetchmany(int(self.options["fetchrows"])):
                columns = [pa.array(column, type=of.type) for column, of in zip(zip(*rows, strict=True), ARROW, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, schema=ARROW)

    def _measure(self) -> tuple[int, int, datetime]:
        with psycopg.connect(self.options["url"], application_name="outbox monitor") as connection:
            row = connection.execute(MEASURE).fetchone()
            assert row is not None
            return row
