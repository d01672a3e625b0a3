"""
A lake whose frames are Iceberg tables as well: Spark writes Parquet, pyiceberg has a catalog say which files are a table's.

Manifests stay the truth. Tables follow them, a commit at a time and each once: how far a table has come stands in its
properties, and changes in one transaction with its files. Rows that a commit has again leave the table in the same one, so
whoever reads it sees each row once. Files of the lake are never changed or deleted for it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import AlwaysTrue, And, GreaterThanOrEqual, LessThanOrEqual
from pyiceberg.io.pyarrow import ArrowScan
from sqlalchemy import URL

from outbox.failpoints import failpoint
from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.lake.base import Commit
from outbox.pipeline.spark.lake.frames import FRAMES, Frame
from outbox.pipeline.spark.lake.manifest import ManifestLake

FOLDER = "_iceberg"  # of all that can be made again from the manifests
LEFT = "left"  # in it, copies of rows whose files a later commit took out of a table, since it has other rows of theirs again

# Properties of a table: the lake whose files it has, and the attempt at each day that it has come to.
LAKE = "outbox.lake"
ATTEMPT = "outbox.attempt."

PROPERTIES = {
    "gc.enabled": "false",  # or whoever expires snapshots may delete files of the lake with them
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "10",  # each commit reads them all
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "10",
}


@dataclass
class IcebergLake(ManifestLake):
    """
    A folder of Parquet whose frames are tables of a catalog: `messages`, `inbox`, and the others.

    Args:
        catalog: what pyiceberg's `load_catalog` is given; empty: the catalog is an SQLite file in the lake.
        namespace: of the tables.
    """

    catalog: dict[str, str] = field(default_factory=dict)
    namespace: str = "outbox"

    def insist_on_writing(self) -> None:
        """Raise LakeError unless it can be written to. Adds to the tables what an archiver that died left out."""
        super().insist_on_writing()
        self._follow()

    def commit(self, commit: Commit) -> None:
        """Make the files of a commit count, for good, and be the tables' too. Raises AlreadyCommitted, LakeError."""
        super().commit(commit)
        self._follow()

    def _follow(self) -> None:
        commits = self.committed()
        try:
            with closing(self._open()) as catalog:
                if not catalog.namespace_exists(self.namespace):
                    catalog.create_namespace(self.namespace)
                for name, frame in FRAMES.items():
                    table = self._table(catalog, frame)
                    for commit in commits:
                        if name in commit.frames:
                            self._add(table, frame, commit)
        except LakeError:
            raise
        except Exception as error:  # pyiceberg's have no family, and a catalog adds those of its own library
            said = (str(error).splitlines() or [""])[0]
            next_step = "Nothing is lost; the next run goes on from there." if self.catalog else self._remedy
            raise LakeError(
                f"The Iceberg tables of the lake in {self.root} cannot be written: {type(error).__name__}: {said}. {next_step}"
            ) from error

    def _open(self) -> Any:
        root = self.root.absolute()
        if {"#", "?"} & set(str(root)):
            raise LakeError(f"The lake in {root} needs another name: Iceberg has URIs of files, in which # and ? end the path.")
        if self.catalog:
            return load_catalog(**{"name": "outbox", **self.catalog})
        (root / FOLDER).mkdir(exist_ok=True)
        return SqlCatalog("outbox", uri=URL.create("sqlite", database=str(root / FOLDER / "catalog.db")).render_as_string())

    def _table(self, catalog: Any, frame: Frame) -> Any:
        """Load a frame's table, or make it."""
        kinds = {"text": pa.string(), "int": pa.int64(), "time": pa.timestamp("us", tz="UTC"), "bytes": pa.binary()}
        schema = pa.schema([(column.name, kinds[column.kind]) for column in frame.columns])
        name = (self.namespace, frame.name)
        try:
            table = catalog.load_table(name)
        except NoSuchTableError:
            location = None if self.catalog else _uri(self.root / FOLDER / frame.name)
            table = catalog.create_table(name, schema, location=location, properties={**PROPERTIES, LAKE: _uri(self.root)})
        if (other := table.properties.get(LAKE)) != _uri(self.root):
            raise LakeError(f"The Iceberg table {'.'.join(name)} is of the lake {other}, not {_uri(self.root)}. {self._remedy}")
        with table.update_schema() as update:
            update.union_by_name(schema)  # a newer version may have more columns
        return table

    def _add(self, table: Any, frame: Frame, commit: Commit) -> None:
        """Write the rows of a commit into a table, each once, unless it has them."""
        attempt = f"{ATTEMPT}{commit.day}"
        paths = [self.root / file for file in commit.frames[frame.name].files]
        if not paths or int(table.properties.get(attempt, 0)) >= commit.attempt:
            return
        said = {"outbox.day": commit.day, "outbox.attempt": str(commit.attempt)}
        outdated, left = self._replace(table, frame, commit, paths)
        with table.transaction() as transaction:
            if outdated:
                with transaction.update_snapshot(snapshot_properties=said).overwrite() as snapshot:
                    for file in outdated:
                        snapshot.delete_data_file(file)
            files = [_uri(path) for path in [*paths, *left]]
            transaction.add_files(files, snapshot_properties=said, check_duplicate_files=False)  # those would be outdated
            transaction.set_properties({attempt: str(commit.attempt)})
        failpoint("archive.after_table")

    def _replace(self, table: Any, frame: Frame, commit: Commit, paths: list[Path]) -> tuple[list[Any], list[Path]]:
        """Return files of a table that have rows which come again, and new files with their other rows."""
        identity = list(frame.identity)
        new = pa.concat_tables(self._checked(path, identity) for path in paths)
        outdated: list[Any] = []
        left: list[Path] = []
        for task in table.scan(row_filter=_between(identity[-1], new)).plan_files():
            stays = _is_missing(new, self._rows(table, task, identity))
            if pc.all(stays).as_py():
                continue
            outdated.append(task.file)
            if pc.any(stays).as_py():
                left.append(self.root / FOLDER / LEFT / f"{frame.name}-{commit.name}-{len(left)}.parquet")
                left[-1].parent.mkdir(parents=True, exist_ok=True)
                rows = self._rows(table, task).filter(stays)
                parquet.write_table(rows, left[-1], compression="zstd", write_page_checksum=True)
        return outdated, left

    def _rows(self, table: Any, task: Any, names: list[str] | None = None) -> Any:
        """Read one of a table's files, all columns or some. pyiceberg looks at no checksums, so ours are read twice."""
        path = Path(task.file.file_path.removeprefix("file://"))
        if path.is_relative_to(self.root.absolute()):
            self._checked(path, names)
        schema = table.schema().select(*names) if names else table.schema()
        return ArrowScan(table.metadata, table.io, schema, AlwaysTrue()).to_table([task])

    def _checked(self, path: Path, names: list[str] | None = None) -> Any:
        """Read a file of the lake, each page held to its checksum."""
        try:
            return parquet.read_table(path, columns=names, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            is_left = path.is_relative_to(self.root.absolute() / FOLDER)
            remedy = self._remedy if is_left else "Bring it back from a copy of the lake."
            raise LakeError(f"The file {path} cannot be read: {error}. {remedy}") from error

    @property
    def _remedy(self) -> str:
        """What to do where tables and lake do not go together."""
        if self.catalog:
            return (
                "Nothing is lost: tables are made from the manifests. If the lake was moved, drop those of the namespace "
                f"{self.namespace!r}; if that is another lake's, set another NAMESPACE. The next run makes them anew."
            )
        return (
            f"Nothing is lost: all in {self.root / FOLDER} is made from the manifests. If the lake was moved, or this is "
            "damaged, remove that folder; the next run makes it anew."
        )


def _uri(path: Path) -> str:
    """Name a file as Iceberg's readers do: nothing in it is quoted."""
    return f"file://{path.absolute()}"


def _between(name: str, rows: Any) -> Any:
    """Choose rows from the least to the greatest value that a column has in these."""
    bounds = pc.min_max(rows[name]).as_py()
    low, high = (one.isoformat() if isinstance(one, datetime) else one for one in (bounds["min"], bounds["max"]))
    return And(GreaterThanOrEqual(name, low), LessThanOrEqual(name, high))


def _is_missing(new: Any, rows: Any) -> Any:
    """Return for each row whether it is not among the new ones."""
    place = pa.array(range(len(rows)))
    others = rows.select(new.column_names).cast(new.schema).append_column("place", place)
    return pc.is_in(place, value_set=others.join(new, new.column_names, join_type="left anti")["place"].combine_chunks())
