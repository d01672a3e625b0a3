"""Opens a lake in its format. A format's library is imported only where it is asked for."""

from __future__ import annotations

from pathlib import Path

from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.lake.base import Lake
from outbox.pipeline.spark.lake.manifest import ManifestLake

LIBRARIES = {"delta": "deltalake", "iceberg": "pyiceberg"}


def open_lake(root: str, kind: str = "manifest", catalog: dict[str, str] | None = None, namespace: str = "outbox") -> Lake:
    """
    Open the lake in a folder. The folder need not be there yet.

    Args:
        kind: `manifest`, or the same with tables beside it for others to read: Delta's log (`delta`), or `iceberg`.
        catalog, namespace: where Iceberg's tables are, as `iceberg.IcebergLake` says.

    Raises:
        LakeError: there is no such format, or its library is missing.
    """
    if kind == "manifest":
        return ManifestLake(Path(root))
    try:
        if kind == "delta":
            from outbox.pipeline.spark.lake.delta import DeltaLake  # its library is an extra

            return DeltaLake(Path(root))
        if kind == "iceberg":
            from outbox.pipeline.spark.lake.iceberg import IcebergLake  # its library is an extra

            return IcebergLake(Path(root), catalog or {}, namespace)
    except ImportError as error:
        raise LakeError(f'{LIBRARIES[kind]} is missing: pip install "django-transactional-outbox[{kind}]"') from error
    raise LakeError(f'A lake is of the format "manifest", "delta" or "iceberg", not {kind!r}.')
