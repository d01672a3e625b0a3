"""Prepare the executors of a cluster, which have a Python and paths of their own: send this package, and check their Python."""

from __future__ import annotations

import atexit
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import ZipFile

from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.errors import PipelineError
from outbox.pipeline.spark.version import source_digest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ("__init__.py", "database/__init__.py", "database/locks.py", "pipeline/__init__.py", "pipeline/spark/**/*.py")
MODULES = ("numpy", "pandas", "pyarrow")

NO_PYTHON = (
    "The executors cannot run Python {version} as {python!r}: {reason}. Set PYSPARK_PYTHON to a Python of this minor version at "
    "the executors."
)
UNFIT = "The executors cannot run the job. {faults}. Set PYSPARK_PYTHON to a Python at the executors that has what is missing."


def prepare_executors(spark: SparkSession, config: PipelineConfig) -> None:
    """
    Send this package to the executors, and check their Python by one small job. Executors of a local master need neither.

    Raises:
        PipelineError: an executor has another minor version of Python, lacks a package, or uses another release of this one.
    """
    context = spark.sparkContext
    if context.master.startswith("local"):
        return
    context.addPyFile(str(_zipped()))
    is_psycopg_needed = any(source.is_postgres and source.reader == "python" for source in (config.outbox, *config.brokers))
    modules = (*MODULES, "psycopg") if is_psycopg_needed else MODULES
    many = context.defaultParallelism
    try:
        found = context.parallelize(range(many), many).mapPartitions(partial(find_faults, modules, source_digest())).collect()
    except Exception as error:  # of py4j: the worker did not start, or could not import this module
        named = re.search(r"\w*(?:Error|IOException): (.+)", str(error))
        reason = (named[1] if named else str(error)).rstrip(".")
        about = {"version": platform.python_version(), "python": context.pythonExec, "reason": reason}
        raise PipelineError(NO_PYTHON.format(**about)) from error
    if found:
        raise PipelineError(UNFIT.format(faults="; ".join(sorted(set(found)))))


def find_faults(modules: Sequence[str], digest: str, _: Iterable[int]) -> Iterator[str]:
    """Yield what this process lacks to be an executor of a driver whose code has this digest."""
    here = f"{platform.node()}, {sys.executable}"
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            yield f"{here}: {error}"
    if source_digest() != digest:
        yield f"{here}: {__file__} is of another release of django-transactional-outbox"


def _zipped() -> Path:
    """Write the modules that executors import to a zip, which is deleted at exit: executors that start later fetch it, too."""
    folder = tempfile.mkdtemp(prefix="outbox-executors-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, f"outbox-{source_digest()}.zip")
    with ZipFile(path, "w") as package:
        for pattern in SHIPPED:
            for file in sorted((ROOT / "outbox").glob(pattern)):
                package.write(file, file.relative_to(ROOT))
    return path
