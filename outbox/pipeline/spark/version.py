"""Which code judges: the package's version, and a digest of the pipeline's own files, wherever they were put."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import metadata
from importlib.abc import Traversable
from importlib.resources import files

PACKAGE = "django-transactional-outbox"


def code_version() -> str:
    """Return something like `1.0+3f2a9c0d1b7e`; `unknown+…` where the package was not installed but copied."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        version = "unknown"
    whole = hashlib.sha256()
    for name, content in sorted(_sources(files("outbox.pipeline.spark"), "")):
        whole.update(f"{name} {len(content)}\n".encode() + content)
    return f"{version}+{whole.hexdigest()[:12]}"


def _sources(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _sources(entry, name)
        elif name.endswith(".py"):
            yield name, entry.read_bytes()
