"""The pipeline's Celery tasks, called as functions."""

import os
import subprocess
import sys

import pytest

from outbox import database
from outbox.pipeline import runs, tasks
from outbox.pipeline.job_config import database_source
from outbox.pipeline.models import AuditRun
from outbox.pipeline.spark.records import archive_lock

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _one_database(settings):
    settings.DATABASE_ROUTERS = ["tests.outbox.test_tasks.OnlyDefault"]


class TestAudit:
    def test_stores_what_a_process_of_its_own_found_and_sends_an_alert(self, job_that, alerts):
        job_that("finds")

        tasks.audit()

        run = AuditRun.objects.get()
        assert (run.state, run.asked_by, run.found) == (AuditRun.RunState.DONE, "beat", 1)
        assert [alert["reason"] for alert in alerts] == [
            f"New findings of audit {run.pk} of database 'default': 1 of 1. See the admin."
        ]

        tasks.audit()

        assert (AuditRun.objects.filter(found=1, exit_code=1).count(), len(alerts)) == (2, 1)  # the same again

    def test_ends_it_when_its_time_is_over(self, job_that, alerts):
        job_that("waits")

        tasks.audit(at_most=1)

        run = AuditRun.objects.get()
        assert run.error.startswith("The audit failed: it was stopped after 0:00:01.")
        assert len(alerts) == 1

    def test_is_skipped_while_another_one_runs_and_says_so(self, job_that, caplog):
        job_that("is clean")
        first = runs.begin("default", asked_by="command", since=None, settle_seconds=1)
        with database.connect("default") as other:
            other.execute(runs.TRY_LOCK)

            tasks.audit()

        skipped = AuditRun.objects.exclude(pk=first.pk).get()
        assert skipped.state == AuditRun.RunState.SKIPPED
        assert f"is already running: run {first.pk}, on " in skipped.error
        (record,) = (record for record in caplog.records if "was skipped" in record.message)
        assert record.levelname == "WARNING"

    def test_stores_what_kept_it_from_beginning(self, settings, alerts):
        audit = {"orders": {"MODEL": "shop.Odrer", "EXPECTS": "OrderPlaced"}}
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"AUDIT": audit}}

        tasks.audit()

        assert "has MODEL 'shop.Odrer'" in AuditRun.objects.get().error
        assert len(alerts) == 1

    def test_cannot_take_what_was_archived_along_where_there_is_no_archive(self, alerts):
        tasks.audit(archived=True)

        assert AuditRun.objects.get().error.startswith("There is no archive to audit")
        assert len(alerts) == 1


@pytest.mark.spark
class TestArchive:
    def test_does_as_the_command_does(self, held, caplog):
        tasks.archive()

        assert "Day 2001-02-03 of database 'default' is due and was not archived: unfinished batches" in caplog.text

    def test_is_skipped_while_another_one_runs_and_says_so(self, with_archive, caplog):
        with archive_lock(database_source("default").url):
            tasks.archive()

        (record,) = (record for record in caplog.records if "was skipped" in record.message)
        assert record.levelname == "WARNING"
        assert "Another archiver of this database is running" in record.message


class TestTheModule:
    def test_loads_no_spark_in_the_worker(self):
        code = (
            "import django; django.setup(); import outbox.pipeline.tasks, sys; assert not {'pyspark', 'py4j'} & set(sys.modules)"
        )

        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"})
