"""Audits on a cluster."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest
from django.db import connection

from outbox.pipeline.spark.config import PipelineConfig, Source
from project.servers.spark import Worker
from tests.database_url import url_of
from tests.outbox.pipeline.spark.cluster.commands import ROOT, run, shape
from tests.outbox.pipeline.spark.tcp import reached_by_tcp

pytestmark = pytest.mark.slow


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
