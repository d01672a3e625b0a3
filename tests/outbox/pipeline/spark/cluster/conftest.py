"""A master and two workers, whose executors know neither this checkout nor Django; and the pages' commands for them."""

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.spark.audit import make_report
from outbox.pipeline.spark.session import Steps
from project.servers.spark import Cluster, Master
from tests.outbox.pipeline.spark.cluster.commands import BARE, ROOT, shape
from tests.outbox.pipeline.spark.test_postgres import outbox

__all__ = ["outbox"]  # a fixture

NEEDED = ("dateutil", "numpy", "pandas", "psycopg", "pyarrow", "pytz", "six", "typing_extensions", "tzdata")  # by executors


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not Master.is_here():
        pytest.skip("no Java: apt-get install default-jre-headless")
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a Python for executors that has what the page says, and nothing else that is installed here."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(np.__file__).parents[1].iterdir():
        if entry.name.startswith(NEEDED):
            (packages / entry.name).symlink_to(entry)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages}:$PYTHONPATH exec {BARE} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYSPARK_PYTHON", str(python))
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")


@pytest.fixture
def of_page(cluster: Cluster, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that finds a command of the pages by its beginning, with this cluster and this folder in it."""
    sections = [(ROOT / "docs" / page).read_text().split("## On a cluster")[1] for page in ("pipeline.md", "how-to/archive.md")]
    joined = re.sub(r"\\\n *", "", "".join(sections))

    def of_page(begins: str) -> str:
        [line] = re.findall(rf"^\$ ({begins}.*?)(?: +#.*)?$", joined, re.MULTILINE)
        return line.replace("spark://host:7077", cluster.url).replace("/shared/", f"{tmp_path}/")

    return of_page


@pytest.fixture
def audit_here(spark: Any, tmp_path: Path) -> Callable[[], Any]:
    """Return a function that returns what a local master finds in the same tables."""

    def audit_here() -> Any:
        config = pipeline_config(settle=timedelta(minutes=5), reader="python", shuffle_partitions=2)
        return shape(make_report(spark, config, str(tmp_path / "local"), Steps()))

    return audit_here


@pytest.fixture
def local(outbox: Any, audit_here: Callable[[], Any]) -> Any:
    return audit_here()
