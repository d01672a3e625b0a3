"""Runs of real processes in the place of Spark's."""

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection
from django.utils import timezone

from outbox import database
from outbox.errors import ConfigurationError
from outbox.pipeline import runs, verdict
from outbox.pipeline.errors import AuditFailed, AuditRunning
from outbox.pipeline.job_config import pipeline_config
from outbox.pipeline.models import AuditBacklog, AuditFinding, AuditLatency, AuditRun
from outbox.pipeline.runs import run_and_store
from outbox.pipeline.spark import jobs
from tests.database_url import url_of
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

State = AuditRun.RunState


@pytest.fixture
def config():
    return pipeline_config(settle=timedelta(minutes=5))


def run(config, **options):
    return run_and_store("default", config, asked_by="command", log=lambda line: None, **options)


class TestARun:
    def test_is_stored_with_all_that_it_found(self, config, job_that):
        job_that("finds")

        made, report = run(config)

        made.refresh_from_db()
        assert (made.state, made.exit_code, made.found, made.asked_by) == (State.DONE, 1, 1, "command")
        assert (made.data_digest, made.code_version) == ("sha256:abc", "1.0+abc")
        assert made.counts["orders"]["assigned"] == 10
        finding = AuditFinding.objects.get()
        assert (finding.kind, finding.first_number, finding.last_number) == ("lost", 7, 8)
        assert finding.message_ids == report["findings"][0]["ids"]
        latency = AuditLatency.objects.get()
        assert (latency.bins, latency.counts) == ([100, 104], [3, 1])
        backlog = AuditBacklog.objects.get()
        assert (backlog.cause, backlog.minutes) == ("consumption slower", [[1795100400, 2], [1795100460, 4]])

    def test_is_signed_where_there_is_a_key(self, config, job_that, key):
        job_that("is clean")

        made, _ = run(config)

        assert verdict.verify(verdict.as_file(made.verdict, made.signature))["run"] == made.pk

    def test_is_stored_unsigned_where_there_is_none(self, config, job_that, monkeypatch):
        monkeypatch.delenv("OUTBOX_AUDIT_KEY", raising=False)
        job_that("is clean")

        made, _ = run(config)

        assert (made.state, made.signature) == (State.DONE, "")

    def test_does_not_begin_with_a_key_that_cannot_sign(self, config, job_that, monkeypatch):
        monkeypatch.setenv("OUTBOX_AUDIT_KEY", "short")
        job_that("is clean")

        with pytest.raises(ConfigurationError):
            run(config)

        assert not AuditRun.objects.exists()

    def test_keeps_its_last_words_where_it_gives_no_answer(self, config, job_that):
        job_that("cannot")

        with pytest.raises(AuditFailed, match=r"exit code 2\). Spark needs Java 17"):
            run(config)

        made = AuditRun.objects.get()
        assert (made.state, made.exit_code) == (State.FAILED, 2)
        assert made.error.endswith("starting Spark\nAudit failed: Spark needs Java 17 or newer, but there is no java on PATH.")

    @pytest.mark.parametrize("does", ["waits", "hangs"])
    def test_is_ended_when_its_time_is_over(self, config, job_that, monkeypatch, does):
        monkeypatch.setattr(jobs, "GRACE_SECONDS", 1)
        job_that(does)

        with pytest.raises(AuditFailed, match="stopped after 0:00:01"):
            run(config, at_most=timedelta(seconds=1))

        assert AuditRun.objects.get().state == State.FAILED

    def test_does_not_tell_the_job_its_key(self, config, job_that, key):
        job_that("tells its environment")

        with pytest.raises(AuditFailed):
            run(config)

        assert "key: None" in AuditRun.objects.get().error

    def test_forgets_runs_of_old_with_all_they_found(self, config, job_that):
        job_that("finds")
        old, _ = run(config)
        aging, _ = run(config)
        AuditRun.objects.filter(pk=old.pk).update(started_at=timezone.now() - timedelta(days=91))
        AuditRun.objects.filter(pk=aging.pk).update(started_at=timezone.now() - timedelta(days=15))

        newest, _ = run(config)

        assert list(AuditRun.objects.order_by("id").values_list("id", flat=True)) == [aging.pk, newest.pk]
        assert set(AuditFinding.objects.values_list("run", flat=True)) == {aging.pk, newest.pk}
        assert list(AuditLatency.objects.values_list("run", flat=True)) == [newest.pk]


class TestASecondRun:
    def test_does_not_begin_beside_the_first(self, config, job_that):
        job_that("is clean")
        first = runs.begin("default", asked_by="command", since=None, settle_seconds=1)
        with database.connect("default") as holder:
            holder.execute(runs.TRY_LOCK)

            with pytest.raises(AuditRunning, match=f"run {first.pk}, on "):
                run(config)

            assert runs.state_of(first) == State.RUNNING
        assert AuditRun.objects.count() == 1

    def test_says_in_utc_since_when_the_first_runs(self, settings):
        settings.USE_TZ, settings.TIME_ZONE = False, "Australia/Lord_Howe"
        first = runs.begin("default", asked_by="command", since=None, settle_seconds=1)
        AuditRun.objects.filter(pk=first.pk).update(started_at=datetime(2026, 11, 1, 14, tzinfo=UTC))
        with database.connect("default") as holder:
            holder.execute(runs.TRY_LOCK)

            with pytest.raises(AuditRunning, match="since 2026-11-01 14:00:00 UTC"), runs.audit_lock("default"):
                pass

    def test_says_that_the_first_is_dead_whose_process_is_gone(self, config, job_that, caplog):
        job_that("is clean")
        first = runs.begin("default", asked_by="command", since=None, settle_seconds=1)
        assert runs.state_of(first) == State.DIED

        run(config)

        first.refresh_from_db()
        assert (first.state, first.error) == (State.DIED, runs.DIED)
        assert f"Audit {first.pk} of database 'default' died" in caplog.text

    def test_that_took_it_for_dead_leaves_the_first_no_answer(self, config, job_that, monkeypatch):
        """The first one stood still so long that the server ended its session, then goes on."""
        job_that("is clean")
        finish = runs.finish

        def after_another(run, report, exit_code):
            AuditRun.objects.filter(pk=run.pk).update(state=State.DIED)
            finish(run, report, exit_code)

        monkeypatch.setattr(runs, "finish", after_another)

        with pytest.raises(AuditFailed, match="marked this one as dead"):
            run(config)

        made = AuditRun.objects.get()
        assert (made.state, made.verdict, made.found) == (State.FAILED, "", None)


COMMAND = [sys.executable, "-c", "import tests.outbox.pipeline.killed"]
PASSWORD = "nobody-may-read-this"


class TestAKilledProcess:
    @pytest.fixture
    def ended(self, tmp_path):
        """The file that the job makes when it ends."""
        return tmp_path / "ended"

    @pytest.fixture
    def folder(self, tmp_path):
        """Where it makes temporary files."""
        (tmp_path / "temporary").mkdir()
        return tmp_path / "temporary"

    @pytest.fixture
    def process(self, ended, folder):
        url = url_of({**connection.settings_dict, "PASSWORD": PASSWORD})
        told = {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "tests.process_settings", "TMPDIR": str(folder)}
        does = {"OUTBOX_TEST_JOB": "waits", "OUTBOX_TEST_FILE": str(ended)}
        environment = {**os.environ, **told, **does}
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}  # we hold its input: a job that inherits it would live on
        with subprocess.Popen(COMMAND, env=environment, text=True, **pipes) as process:
            assert process.stderr.readline() == "starting Spark\n"
            yield process
            process.kill()
        wait_until(ended.exists, seconds=30)

    def test_takes_its_job_along(self, process, ended):
        made = AuditRun.objects.get()
        assert runs.state_of(made) == State.RUNNING

        process.send_signal(signal.SIGKILL)

        process.wait()
        wait_until(ended.exists, seconds=30)
        wait_until(lambda: runs.state_of(made) == State.DIED, seconds=30)

    def test_leaves_no_password_behind(self, process, ended, folder):
        process.send_signal(signal.SIGKILL)

        process.wait()
        wait_until(ended.exists, seconds=30)
        left = [path for path in folder.rglob("*") if path.is_file()]
        assert [path for path in left if PASSWORD in path.read_text(errors="replace")] == []
