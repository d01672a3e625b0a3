"""Read rows of the lake's files with pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyarrow import parquet


def find_rows(file: Path, message_id: UUID) -> list[dict[str, Any]]:
    """
    Return the rows of one message, from the row groups that may contain it.

    Raises:
        OSError: the file cannot be read, or a page does not match its checksum.
    """
    is_it = [("message_id", "=", str(message_id))]
    try:
        found = parquet.read_table(file, filters=is_it, use_threads=False, page_checksum_verification=True)
    except pa.ArrowException as error:
        raise OSError(str(error)) from error
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows
