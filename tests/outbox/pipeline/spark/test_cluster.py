"""Jobs on a real cluster: a master and two workers, whose executors know neither this checkout nor Django."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models import F
from django.db.models.expressions import RawSQL

from outbox.models import Batch, CheckBack, FailedSend, Inbox, Lane, MessageRow, OperatorAct
from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.spark.audit import make_report
from outbox.pipeline.spark.config import PipelineConfig, Source
from outbox.pipeline.spark.session import Steps, find_faults, source_digest
from project.servers.spark import Cluster, Master, Worker
from tests.database_url import url_of
from tests.outbox.pipeline.spark.archive.conftest import FIRST, PER_DAY, SECOND
from tests.outbox.pipeline.spark.tcp import reached_by_tcp
from tests.outbox.pipeline.spark.test_postgres import outbox

__all__ = ["outbox"]  # a fixture

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]
NEEDED = ("dateutil", "numpy", "pandas", "psycopg", "pyarrow", "pytz", "six", "typing_extensions", "tzdata")  # by executors
BARE = Path(sys.base_prefix, "bin", "python{}.{}".format(*sys.version_info))

OTHER_VERSION = """
import collections, sys
sys.version_info = collections.namedtuple("version_info", "major minor micro releaselevel serial")(3, 99, 0, "final", 0)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not Master.is_here():
        pytest.skip("no Java: apt-get install default-jre-headless")
    with Cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


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


def run(line: str, *more: str, log: io.StringIO | None = None) -> tuple[str, Any]:
    """Run a command of a page in this process. Return what it printed, and its exit code."""
    _, _, command, *arguments = shlex.split(line)
    out = io.StringIO()
    try:
        call_command(command, *arguments, *more, stdout=out, stderr=log or io.StringIO())
    except SystemExit as error:
        return out.getvalue(), error.code
    except CommandError as error:
        return str(error), error.returncode
    return out.getvalue(), 0


def shape(report: dict[str, Any]) -> Any:
    names = ("kind", "stage", "topic", "group", "first", "last", "ids")
    return report["digest"], report["counts"], sorted([one[name] for name in names] for one in report["findings"])


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


class Killer(io.StringIO):
    """The log of a command; it kills a worker, with its executor, when it has a line. `when`: the lines."""

    def __init__(self, when: dict[str, Worker]) -> None:
        super().__init__()
        self._when = when
        self.killed: list[Worker] = []

    def write(self, text: str) -> int:
        worker = self._when.get(text.strip())
        if worker and worker.executors:
            worker.kill()
            worker.start()
            self.killed.append(worker)
        return super().write(text)


class TestTheCommandsOfThePage:
    def test_find_it_under_spark_submit(self, local, of_page, with_jar, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert run(of_page("python manage.py outbox_audit --write-config"))[1] == 0
        with reached_by_tcp(url_of(connection.settings_dict)) as url:
            read_by_jdbc(url, tmp_path / "audit.json")

            outcome = subprocess.run(
                ["bash", "-c", of_page("spark-submit")],
                env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
            )

        assert outcome.returncode == 1, outcome.stdout
        assert shape(json.loads((tmp_path / "report.json").read_text())) == local

    def test_find_what_a_local_master_finds_though_each_worker_is_killed_once(self, local, of_page, cluster):
        first, second = cluster.nodes
        log, started = Killer({"reading inbox": first, "comparing the stages": second}), monotonic()

        said, code = run(of_page("python manage.py outbox_audit --master"), "--json", log=log)
        for worker in cluster.nodes:  # they end with the thread that has read the log and started them
            worker.kill()
            worker.start()

        assert log.killed == cluster.nodes, log.getvalue()
        assert code == 1, said + log.getvalue()
        report = json.loads(said)
        assert shape(report) == local
        assert list(report["steps"])[:3] == ["starting Spark", "copying the history", "opening the history"]
        assert sum(report["steps"].values()) <= report["seconds"] <= monotonic() - started

    def test_archive_a_day_and_judge_it_as_if_it_had_never_left(self, ids, with_archive, settings, of_page, audit_here):
        after = datetime.now(UTC) - datetime.combine(SECOND, time(1), UTC)
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"ARCHIVE": {"PATH": str(with_archive), "AFTER": after}}}
        for model in (CheckBack, FailedSend, OperatorAct):  # each is a file more, of which an audit needs nothing
            model.objects.all().delete()
        Inbox.objects.update(source=RawSQL("SELECT id FROM outbox_source", []))
        Inbox.objects.filter(number=3).delete()
        Inbox.objects.filter(handled_at__date=SECOND).update(number=F("number") + PER_DAY)
        Batch.objects.filter(claimed_at__date=SECOND).update(first_seq=F("first_seq") + PER_DAY)
        Lane.objects.create(topic_id=MessageRow.objects.first().topic_id, lane=1, last_seq=2 * PER_DAY + 1)
        whole = audit_here()

        said, code = run(of_page("python manage.py outbox_archive"), "--database", "default", "--json")

        assert (code, list(json.loads(said)["default"]["days"])) == (0, [str(FIRST)]), said
        assert {str(one.id) for one in MessageRow.objects.all()} == {*ids[PER_DAY:]}
        said, code = run(of_page("python manage.py outbox_audit --archived"), "--json")
        assert code == 1, said
        assert shape(json.loads(said)) == whole

    def test_find_what_kafka_has_not(self, transactional_db, of_page, audit_here, spark, settings, tmp_path, kafka_jars):
        from tests.outbox.brokers.kafka.cluster import create_topic  # here, because few machines have Kafka's client
        from tests.outbox.pipeline.spark.kafka.test_audit import Judge, Sent

        sent = Sent(create_topic(), 3)
        sent.store(1, 3)
        Judge(spark, settings, tmp_path).config(sent.topic)
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"KAFKA_JARS": kafka_jars}}
        local = audit_here()

        said, code = run(of_page("python manage.py outbox_audit --master"), "--json")

        assert code == 1, said
        assert shape(json.loads(said)) == local
        assert [(one["kind"], one["ids"]) for one in json.loads(said)["findings"]] == [("lost", [sent.ids[1]])]


def read_by_jdbc(url: str, file: Path) -> None:
    """Put another URL of the same database into a configuration."""
    config = PipelineConfig.from_file(file)
    file.write_text(replace(config, outbox=Source(url), brokers=[Source(url) for _ in config.brokers]).to_json())


class TestAWrongPython:
    def test_is_one_error_before_any_work(self, outbox, of_page, monkeypatch):
        monkeypatch.setenv("PYSPARK_PYTHON", str(BARE))

        log = io.StringIO()

        said, code = run(of_page("python manage.py outbox_audit --master"), log=log)

        assert code == 2
        assert re.search(
            r"The executors cannot run the job\. .*No module named 'numpy'; .*No module named 'pyarrow'.*PYSPARK_PYTHON", said
        )
        assert "reading" not in log.getvalue()

    def test_of_another_minor_version_is_named(self, outbox, of_page, monkeypatch, tmp_path):
        other = tmp_path / "other"
        other.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}:$PYTHONPATH exec {BARE} "$@"\n')
        other.chmod(0o755)
        (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
        monkeypatch.setenv("PYSPARK_PYTHON", str(other))

        said, code = run(of_page("python manage.py outbox_audit --master"))

        assert code == 2
        assert re.search(r"The executors cannot run Python 3\.\d+\.\d+ as '.*/other': .*different version: 3\.99", said)

    def test_with_another_release_of_the_package_is_named(self):
        assert list(find_faults(["json"], source_digest(), [])) == []

        [fault] = find_faults([], "of another release", [])

        assert fault.endswith("session.py is of another release of django-transactional-outbox")
