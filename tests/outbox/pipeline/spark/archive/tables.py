"""What Iceberg's tables hold, read by pyiceberg."""

from __future__ import annotations

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table
from sqlalchemy import URL

from outbox import database
from outbox.database import partitions
from outbox.pipeline.spark.lake.frames import FRAMES
from outbox.pipeline.spark.lake.iceberg import IcebergLake
from tests.outbox.pipeline.spark.archive.conftest import FIRST


def table_of(lake: IcebergLake, frame: str = "messages") -> Table:
    uri = URL.create("sqlite", database=str(lake.root / "_iceberg" / "catalog.db")).render_as_string()
    with SqlCatalog("outbox", uri=uri) as catalog:
        return catalog.load_table((lake.namespace, frame))


def rows_of(lake: IcebergLake, frame: str = "messages") -> pa.Table:
    return table_of(lake, frame).scan().to_arrow().sort_by(FRAMES[frame].key[-1])


def read(lake: IcebergLake, frame: str = "messages", column: str = "message_id") -> list:
    return sorted(rows_of(lake, frame)[column].to_pylist())


def comes_back(message: str) -> None:
    """Let a message that was archived be sent again, years later."""
    with database.connect("default") as own:
        partitions.make_day(own, FIRST)
        own.execute("INSERT INTO outbox_message (id, topic_id, body) VALUES (%s, 0, 'again')", [message])
