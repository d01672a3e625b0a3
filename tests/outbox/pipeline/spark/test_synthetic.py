"""Made-up histories with known faults, audited by the job itself, as spark-submit runs it, and from the tables of a database."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from django.db import connection

from benchmarks.synthetic.database import write_database
from benchmarks.synthetic.plan import Plan
from benchmarks.synthetic.write import write_history
from outbox.models import Lane
from outbox.pipeline.spark import PipelineError
from outbox.pipeline.spark.audit import audit
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.history import open_history
from outbox.pipeline.spark.latency import count_times, latency_report
from outbox.pipeline.spark.postgres import copy_history
from tests.database_url import url_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]
PIPELINE = ROOT / "outbox" / "pipeline"
PLAN = Plan(40_000, lost=40, duplicated=10, orphans=10, topics=1, lanes=1, groups=2, seed=3)


@pytest.fixture(scope="module")
def made(spark, tmp_path_factory):
    """A folder, and the truth about it."""
    folder = str(tmp_path_factory.mktemp("made"))
    return folder, write_history(spark, PLAN, folder)


def shape(one):
    return one["kind"], one["stage"], one["topic"], one["lane"], one["group"], one["first"], one["last"], one["count"]


class TestAMadeUpHistory:
    def test_has_exactly_the_faults_it_says(self, spark, made):
        folder, truth = made
        config = PipelineConfig.from_json(truth["config"])

        report = audit(spark, config, open_history(spark, folder))

        numbered = [one.as_dict() for one in report.findings if one.lane >= 0]
        assert sorted(map(shape, numbered)) == sorted(map(shape, truth["findings"]))
        others = [one for one in report.findings if one.lane < 0]
        assert sorted(about for one in others for about in one.about) == truth["orders without a message"]

    def test_has_the_latencies_it_was_given(self, spark, made):
        folder, truth = made
        config = PipelineConfig.from_json(truth["config"])

        report = latency_report(config, count_times(spark, config, open_history(spark, folder)))

        found = {(one["hop"], one["group"]): one for one in report["percentiles"]}
        assert found["store", ""]["p50"] == pytest.approx(0.007 + 0.693 * 0.002, rel=0.1)  # 7 ms and an exponential of 2 ms
        assert found["handle", "group-1"]["p99"] == pytest.approx(0.020 + 4.605 * 0.030, rel=0.1)
        assert report["findings"] == []

    def test_is_audited_under_spark_submit_with_a_zip(self, made, tmp_path):
        _, truth = made
        config, output = tmp_path / "config.json", tmp_path / "report.json"
        config.write_text(truth["config"])
        with zipfile.ZipFile(tmp_path / "outbox.zip", "w") as package:
            for path in (ROOT / "outbox" / "__init__.py", PIPELINE / "__init__.py", *(PIPELINE / "spark").rglob("*.py")):
                package.write(path, path.relative_to(ROOT))
        (tmp_path / "job.py").write_text((PIPELINE / "spark" / "jobs.py").read_text())
        submit = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[2]", "--driver-memory", "1g"]
        command = [*submit, "--py-files", str(tmp_path / "outbox.zip"), str(tmp_path / "job.py"), "audit"]
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "TZ": "UTC"}

        outcome = subprocess.run(
            [*command, "--config", str(config), "--output", str(output)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

        assert outcome.returncode == 1, outcome.stderr
        assert len(json.loads(output.read_text())["findings"]) >= len(truth["findings"])


SMALL_PLAN = Plan(6_000, lost=24, duplicated=6, orphans=6, topics=2, lanes=2, groups=2, seed=5)


@pytest.fixture
def url(transactional_db):
    return url_of(connection.settings_dict)


class TestADatabase:
    def test_has_exactly_the_faults_it_says(self, spark, url, tmp_path):
        truth = write_database(spark, SMALL_PLAN, url)

        config = PipelineConfig.from_json(truth["config"])
        copy_history(spark, config, str(tmp_path))
        report = audit(spark, config, open_history(spark, str(tmp_path)))
        found = [one.as_dict() for one in report.findings]
        assert sorted(map(shape, found)) == sorted(map(shape, truth["findings"]))
        assert {one["kind"] for one in found} == {"lost", "duplicated", "orphan"}
        assert sum(counts["assigned"] for counts in report.counts.values()) == SMALL_PLAN.messages

    def test_is_refused_where_it_has_rows(self, spark, url):
        Lane.objects.create(topic_id=1, lane=1, last_seq=1)

        with pytest.raises(PipelineError, match=r"The table outbox_lane has rows\. .* nothing was written"):
            write_database(spark, SMALL_PLAN, url)

    def test_is_refused_where_it_has_no_tables(self, spark, url):
        with pytest.raises(PipelineError, match=r"no table outbox_message: run manage\.py migrate"):
            write_database(spark, SMALL_PLAN, f"{url}&options=-csearch_path%3Dpg_catalog")

    def test_is_refused_where_nobody_answers(self, spark):
        with pytest.raises(PipelineError, match="The database cannot be filled"):
            write_database(spark, SMALL_PLAN, "postgresql://nobody@127.0.0.1:1/nothing")
