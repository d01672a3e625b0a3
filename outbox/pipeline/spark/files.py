"""Open the files of a history with pyarrow, from the URLs that Spark reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlsplit

import pyarrow as pa
from pyarrow.fs import FileSystem

# Spark's schemes -> pyarrow's.
SCHEMES = {"file": "file", "hdfs": "hdfs", "viewfs": "viewfs", "gs": "gs", "s3": "s3", "s3a": "s3", "s3n": "s3"}
SAFE = "/%!$&'()*+,;=:@"


@contextmanager
def opened(file: str) -> Iterator[Any]:
    """Open a file. Raises OSError or pyarrow.ArrowException."""
    address = urlsplit(file)  # Spark does not escape non-ASCII characters
    known = address._replace(scheme=SCHEMES.get(address.scheme, address.scheme), path=quote(address.path, safe=SAFE))
    filesystem, path = FileSystem.from_uri(known.geturl())
    with filesystem.open_input_file(path) as found:
        yield found


def can_be_opened(files: Sequence[str]) -> bool:
    """Return whether pyarrow supports the file system and can read there."""
    try:
        with opened(files[0]):
            return True
    except (OSError, pa.ArrowException, IndexError):
        return False
