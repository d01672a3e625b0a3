"""A second writer, in plain Python: the steps are tested with it, where no Spark need start."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

from outbox.pipeline.spark.lake import HASH_DIGITS, NULL, SEPARATOR, Frame
from outbox.pipeline.spark.statements import JOIN

KINDS = {"text": pa.string(), "int": pa.int64(), "time": pa.timestamp("us", tz="UTC"), "bytes": pa.binary()}


class ArrowWriter:
    def __init__(self, url: str) -> None:
        self.url = url

    def write(self, frame: Frame, queries: Sequence[str], snapshot: str, folder: Path, row_bytes: int) -> None:
        folder.mkdir(parents=True)
        schema = pa.schema([(column.name, KINDS[column.kind]) for column in frame.columns])
        for number, query in enumerate(queries):
            with psycopg.connect(self.url) as connection:
                connection.execute(JOIN.format(snapshot=snapshot))
                rows = connection.execute(query).fetchall()
            columns = list(zip(*rows, strict=True)) or [()] * len(schema)
            arrays = [pa.array(values, type=field.type) for values, field in zip(columns, schema, strict=True)]
            table = pa.Table.from_arrays(arrays, schema=schema)
            table = table.sort_by("message_id") if frame.id else table
            pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=4, write_page_checksum=True)

    def verify(self, frame: Frame, files: Sequence[Path]) -> tuple[int, str]:
        hashes = [row_hash(frame, row) for file in files for row in pq.read_table(file).to_pylist()]
        return len(hashes), str(sum(hashes))


def row_hash(frame, row):
    texts = []
    for column in frame.columns:
        value = row[column.name]
        if value is None:
            texts.append(NULL)
        elif column.kind == "time":
            texts.append(str(round(value.timestamp() * 1_000_000)))
        elif column.kind == "bytes":
            texts.append(hashlib.md5(value).hexdigest())  # noqa: S324
        else:
            texts.append(str(value))
    return int(hashlib.md5(SEPARATOR.join(texts).encode()).hexdigest()[:HASH_DIGITS], 16)  # noqa: S324
