"""A file that only its owner can read."""

from __future__ import annotations

import os
from pathlib import Path


def write_privately(path: Path, text: str) -> None:
    """
    Write a file with mode 600, regardless of the umask and of the file's previous mode.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.truncate()
        file.write(text)
