"""What database and lake hold, read in plain Python."""

import json
from pathlib import Path

import pyarrow.parquet as pq
from django.db import connection

from outbox.pipeline.spark.lake import TIMED_FRAMES, Lake


def in_lake(lake: Lake, frame: str = "messages", column: str = "message_id") -> list:
    having = [commit.frames[frame] for commit in lake.committed() if frame in commit.frames]
    files = [file for written in having for file in written.files]
    return [value for file in files for value in pq.read_table(lake.root / file)[column].to_pylist()]


def in_database(table: str = "outbox_message", column: str = "id::text") -> list:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {column} FROM {table}")
        return [value for (value,) in cursor.fetchall()]


def books_left() -> dict[str, int]:
    return {name: len(in_database(f"outbox_{name}", "1")) for name in TIMED_FRAMES}


def state_of(day) -> tuple:
    with connection.cursor() as cursor:
        cursor.execute("SELECT state, attempt, rows FROM outbox_archived_day WHERE day = %s", [day])
        return cursor.fetchone()


def files_of(lake: Lake, frame: str = "messages") -> list[Path]:
    return [lake.root / file for commit in lake.committed() for file in commit.frames[frame].files]


def flip_a_bit(path: Path, text: str = "Zoë") -> None:
    """Have a file say something else in the middle of a page, as a bad disk does: no reader stumbles over it by itself."""
    raw = bytearray(path.read_bytes())
    raw[raw.index(text.encode())] ^= 1
    path.write_bytes(raw)
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)  # Hadoop's own, beside files of a local disk; copies may lack it


def without_frame(lake: Lake, frame: str) -> None:
    """Make manifests what they were before there was such a frame."""
    for path in (lake.root / "_manifests").glob("*.json"):
        commit = json.loads(path.read_text())
        del commit["frames"][frame]
        path.write_text(json.dumps(commit))
