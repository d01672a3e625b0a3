"""
A lake is a folder of Parquet files with a manifest for each commit. Commits are atomic.

The files are written first, each attempt in its own folder; they are committed by their manifest. The manifest is written to a
temporary file, and published with link(2), which never replaces a file. A writer that dies leaves files that are never read.

    <lake>/messages/2026-11-01/a1/part-….parquet      files of attempt 1
    <lake>/_manifests/2026-11-01.a1.json              its manifest
"""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from outbox.pipeline.spark.errors import AlreadyCommitted, LakeError
from outbox.pipeline.spark.lake.commit import Commit

MANIFESTS = "_manifests"


@dataclass
class Lake:
    """A lake in a local or mounted folder, on a file system with hard links. The folder need not exist yet."""

    root: Path

    def require_writable(self) -> None:
        """Raise LakeError unless the lake is writable."""
        try:
            self._manifests.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._manifests, prefix=".try-") as file:
                os.link(file.name, f"{file.name}.link")
                Path(f"{file.name}.link").unlink()
        except OSError as error:
            raise LakeError(
                f"The lake in {self.root} cannot be written: {error.strerror}. Allow the process that archives to write there, "
                "on a file system with hard links."
            ) from error

    def commit(self, commit: Commit) -> None:
        """Write the manifest of a commit. Raises AlreadyCommitted, LakeError."""
        try:
            self._sync_files(commit)
            self._manifests.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._manifests, prefix=f".{commit.name}-", delete=False) as file:
                file.write(commit.to_json())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(file.name, self._manifests / f"{commit.name}.json")
            finally:
                Path(file.name).unlink()
            _sync_folder(self._manifests)
        except FileExistsError as error:
            raise AlreadyCommitted(f"The lake in {self.root} already has {commit.name}.") from error
        except OSError as error:
            raise LakeError(f"{commit.name} cannot be committed to the lake in {self.root}: {error}.") from error

    def committed(self, day: str = "") -> list[Commit]:
        """Return all commits, or those of a day, oldest first. Raises LakeError if one cannot be read."""
        try:
            names = [entry.name for entry in os.scandir(self._manifests) if not entry.name.startswith(".")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LakeError(f"The lake in {self.root} cannot be read: {error.strerror}.") from error
        found = [self._read(self._manifests / name) for name in names if name.startswith(day)]
        return sorted(found, key=lambda commit: (commit.day, commit.attempt))

    def require_files(self, commit: Commit, *frames: str) -> None:
        """Raise LakeError unless all files of a commit, or of some of its frames, exist with their size."""
        for name, written in commit.frames.items():
            for file, size in written.files.items() if not frames or name in frames else ():
                try:
                    found = (self.root / file).stat().st_size
                except OSError as error:
                    raise LakeError(
                        f"The file {file} of {commit.name} in the lake in {self.root} cannot be read: {error.strerror}. "
                        "Restore it from a backup of the lake."
                    ) from error
                if found != size:
                    raise LakeError(
                        f"The file {file} of {commit.name} in {self.root} has {found} bytes instead of {size}. "
                        "Restore it from a backup of the lake."
                    )

    def _read(self, path: Path) -> Commit:
        try:
            return Commit.from_json(path.read_text())
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LakeError(
                f"The manifest {path} cannot be read: {type(error).__name__}: {error}. It was damaged after it was written. "
                "Restore it from a backup of the lake."
            ) from error

    @property
    def _manifests(self) -> Path:
        return self.root / MANIFESTS

    def _sync_files(self, commit: Commit) -> None:
        """Flush the files and their folders to disk, before the manifest names them."""
        files = [self.root / file for written in commit.frames.values() for file in written.files]
        for file in files:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        folders = {folder for file in files for folder in file.parents if folder.is_relative_to(self.root)}
        for folder in sorted(folders, reverse=True):
            _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not supported by some file systems, which do not need it
            raise
    finally:
        os.close(descriptor)
