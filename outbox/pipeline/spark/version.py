"""The version of the code that audits: the package's version, and a digest of the pipeline's source files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import metadata
from importlib.abc import Traversable
from importlib.resources import files

PACKAGE = "django-transactional-outbox"


def code_version() -> str:
    """Return a version such as `1.0+3f2a9c0d1b7e`, or `unknown+…` if the package was copied and not installed."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        version = "unknown"
    return f"{version}+{source_digest()}"


def source_digest() -> str:
    """Return the digest of the pipeline's source files, in a folder or a zip."""
    whole = hashlib.sha256()
    for name, content in sorted(_sources(files("outbox.pipeline.spark"), "")):
        whole.update(f"{name} {len(content)}\n".encode() + content)
    return whole.hexdigest()[:12]


def _sources(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _sources(entry, name)
        elif name.endswith(".py"):
            yield name, entry.read_bytes()
