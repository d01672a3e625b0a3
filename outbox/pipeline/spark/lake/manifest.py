"""
A lake is a folder of Parquet with a manifest for each commit, which is visible at once and as a whole, or not at all.

Files are written first, each attempt into a folder of its own; only a manifest makes them count. It is written whole and put in
its place by link(2), which never replaces anything. So a writer that died leaves files that nobody reads.

    <lake>/messages/2026-11-01/a1/part-….parquet      files of attempt 1
    <lake>/_manifests/2026-11-01.a1.json              they count
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
    """A lake in a folder of this machine, or one that is mounted and knows hard links. The folder need not be there yet."""

    root: Path

    def require_writable(self) -> None:
        """Raise LakeError unless it can be written to."""
        try:
            self._manifests.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._manifests, prefix=".try-") as file:
                os.link(file.name, f"{file.name}.link")
                Path(f"{file.name}.link").unlink()
        except OSError as error:
            raise LakeError(
                f"The lake in {self.root} cannot be written: {error.strerror}. Give the process that archives the right to, on a "
                "file system with hard links."
            ) from error

    def commit(self, commit: Commit) -> None:
        """Make the files of a commit count, for good. Raises AlreadyCommitted, LakeError."""
        try:
            self._keep_files(commit)
            self._manifests.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._manifests, prefix=f".{commit.name}-", delete=False) as file:
                file.write(commit.to_json())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(file.name, self._manifests / f"{commit.name}.json")
            finally:
                Path(file.name).unlink()
            _keep_folder(self._manifests)
        except FileExistsError as error:
            raise AlreadyCommitted(f"The lake in {self.root} already has {commit.name}.") from error
        except OSError as error:
            raise LakeError(f"{commit.name} cannot be committed to the lake in {self.root}: {error}.") from error

    def committed(self, day: str = "") -> list[Commit]:
        """Return all commits, or those of a day, oldest first. Raises LakeError where one cannot be read."""
        try:
            names = [entry.name for entry in os.scandir(self._manifests) if not entry.name.startswith(".")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LakeError(f"The lake in {self.root} cannot be read: {error.strerror}.") from error
        found = [self._read(self._manifests / name) for name in names if name.startswith(day)]
        return sorted(found, key=lambda commit: (commit.day, commit.attempt))

    def require_files(self, commit: Commit, *frames: str) -> None:
        """Raise LakeError unless the files of a commit are there in full; with `frames`, only those of these."""
        for name, written in commit.frames.items():
            for file, size in written.files.items() if not frames or name in frames else ():
                try:
                    found = (self.root / file).stat().st_size
                except OSError as error:
                    raise LakeError(
                        f"The lake in {self.root} has committed {commit.name}, and its file {file} cannot be read: "
                        f"{error.strerror}. Bring it back from a copy of the lake."
                    ) from error
                if found != size:
                    raise LakeError(
                        f"The file {file} of {commit.name} in {self.root} has {found} bytes instead of {size}. "
                        "Bring it back from a copy of the lake."
                    )

    def _read(self, path: Path) -> Commit:
        try:
            return Commit.from_json(path.read_text())
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise LakeError(
                f"The manifest {path} cannot be read: {type(error).__name__}: {error}. A manifest appears as a whole, so it was "
                "changed since. Bring it back from a copy of the lake."
            ) from error

    @property
    def _manifests(self) -> Path:
        return self.root / MANIFESTS

    def _keep_files(self, commit: Commit) -> None:
        """Flush the files and their folders to disk before anything names them."""
        files = [self.root / file for written in commit.frames.values() for file in written.files]
        for file in files:
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        folders = {folder for file in files for folder in file.parents if folder.is_relative_to(self.root)}
        for folder in sorted(folders, reverse=True):
            _keep_folder(folder)


def _keep_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems do not sync folders, and need not
            raise
    finally:
        os.close(descriptor)
