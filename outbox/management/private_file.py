"""A file that only its owner can read."""

from __future__ import annotations

import os
from pathlib import Path


def write_privately(path: Path, text: str) -> None:
    """
    Write a file with mode 600, whatever the umask is and whatever mode it had.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.truncate()
        file.write(text)
