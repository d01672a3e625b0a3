import os
from pathlib import Path

import pytest

import outbox
from outbox.pipeline.spark import JavaMissing, PipelineError, session
from outbox.pipeline.spark.config import PipelineConfig, Source


def java(folder, said):
    """Make a program that says what version it is."""
    path = folder / "bin" / "java"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def _no_java(monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")


class TestJava:
    def test_is_named_where_it_is_missing(self):
        with pytest.raises(JavaMissing, match=r"there is no java on PATH\. On Debian and Ubuntu: apt-get install"):
            session.find_java()

    def test_is_looked_for_where_java_home_says(self, monkeypatch, tmp_path):
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))

        with pytest.raises(JavaMissing, match="has no bin/java"):
            session.find_java()

    def test_is_refused_where_it_is_too_old(self, monkeypatch, tmp_path):
        java(tmp_path, 'openjdk version "11.0.2"')
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))

        with pytest.raises(JavaMissing, match=r'Java 17 or newer, but .* reports: openjdk version "11'):
            session.find_java()

    def test_is_found(self, monkeypatch, tmp_path):
        path = java(tmp_path, 'openjdk version "21.0.1"')
        monkeypatch.setenv("PATH", str(path.parent))

        assert session.find_java() == path


class TestAUser:
    def test_without_a_name_is_refused_before_spark_starts(self, monkeypatch):
        monkeypatch.setattr(os, "getuid", lambda: 54321)

        with pytest.raises(PipelineError, match=r"uid 54321 has no entry in passwd\. Add one .* NSS_WRAPPER_PASSWD"):
            session.require_user()

    def test_with_a_name_is_accepted(self):
        session.require_user()


class TestSparkConnect:
    def test_is_refused_before_spark_starts(self):
        config = PipelineConfig(Source("postgresql://"), master="sc://host:15002")

        with pytest.raises(PipelineError, match=r"cannot run over Spark Connect, .* instead of 'sc://host:15002'"):
            session.build_session(config)


class TestTheDriver:
    def test_is_named_where_it_is_missing(self, monkeypatch):
        monkeypatch.setattr(session, "JARS", ("/nowhere.jar",))

        with pytest.raises(PipelineError, match=r'not at /nowhere\.jar\. .*Or read with reader="python"'):
            session.find_jar()


class TestWorkers:
    def test_find_this_package_wherever_spark_is_started(self, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", "/theirs")

        session.add_package_to_workers()
        session.add_package_to_workers()

        root = str(Path(outbox.__file__).resolve().parents[1])
        assert os.environ["PYTHONPATH"].split(os.pathsep) == [root, "/theirs"]


class TestTheSourceForKafka:
    def test_is_looked_for_in_the_folder_of_the_settings(self, tmp_path):
        with pytest.raises(PipelineError, match=r'no spark-sql-kafka-\*\.jar in .*Set OUTBOX\["PIPELINE"\]\["KAFKA_JARS"\] to'):
            session.find_kafka_jars(str(tmp_path))
        for name in ("spark-sql-kafka-0-10_2.13-4.2.0.jar", "kafka-clients-3.9.2.jar"):
            (tmp_path / name).touch()

        found = session.find_kafka_jars(str(tmp_path))

        assert [Path(one).name for one in found] == ["kafka-clients-3.9.2.jar", "spark-sql-kafka-0-10_2.13-4.2.0.jar"]
