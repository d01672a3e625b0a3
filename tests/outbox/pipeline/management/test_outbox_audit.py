"""The command, with a stand-in for Spark's process; its exit codes are what schedulers go by."""

import io
import json
import re
import time
from datetime import UTC, datetime

import pytest
from django.core.management import CommandError, call_command
from django.urls import reverse

from outbox.pipeline.management.commands.outbox_audit import Command
from outbox.pipeline.models import AuditFinding, AuditRun

pytestmark = pytest.mark.django_db


def audit(*arguments):
    """Return what the command printed, and how it ended."""
    out = io.StringIO()
    try:
        call_command("outbox_audit", *arguments, stdout=out, stderr=io.StringIO())
    except SystemExit as error:
        return out.getvalue(), error.code
    except CommandError as error:
        return str(error), error.returncode
    return out.getvalue(), 0


class TestItsExitCode:
    @pytest.fixture(autouse=True, params=[True, False], ids=["times with zones", "times without"])
    def _zones(self, settings, request):
        settings.USE_TZ = request.param

    def test_is_0_where_nothing_is_wrong(self, job_that):
        job_that("is clean")

        said, code = audit()

        assert code == 0
        assert said.endswith("Nothing is lost, orphaned, repeated, late or out of order.\n")

    def test_comes_with_the_seconds_of_the_whole_process_and_of_each_step(self, job_that):
        job_that("is clean")
        started = time.monotonic()

        said, _ = audit()

        [seconds] = re.findall(r"It took ([\d.]+) s: starting Spark 1\.0, latency 0\.2\.", said)
        assert 0 < float(seconds) <= time.monotonic() - started + 0.05  # the job itself says 1500, and knows nothing of its start

    def test_is_1_where_something_is(self, job_that):
        job_that("finds")

        said, code = audit()

        assert code == 1
        assert "! lost: 2 x topic 'orders', lane 1, numbers 7 to 8, at broker: 01a1ff7e" in said

    def test_is_2_where_there_is_no_answer(self, job_that):
        job_that("cannot")

        said, code = audit()

        assert (said, code) == (
            "The audit failed (exit code 2). Spark needs Java 17 or newer, but there is no java on PATH.",
            2,
        )

    def test_is_2_for_settings_that_name_what_is_not_there(self, settings):
        settings.OUTBOX = {
            **settings.OUTBOX,
            "PIPELINE": {"AUDIT": {"orders": {"MODEL": "shop.Odrer", "EXPECTS": "OrderPlaced"}}},
        }

        said, code = audit()

        assert code == 2
        assert "has MODEL 'shop.Odrer'" in said

    def test_is_2_where_there_is_no_archive_to_be_audited(self, job_that):
        job_that("is clean")

        said, code = audit("--archived")

        assert (said, code) == ('There is no archive to audit: OUTBOX["PIPELINE"]["ARCHIVE"] is not set.', 2)

    @pytest.mark.parametrize("option", ["--settle", "--time-limit"])
    @pytest.mark.parametrize("length", ["nan", "inf", "-inf", "-1", "1e30", "1e12"])
    def test_is_2_for_what_is_no_length_of_time(self, option, length, job_that, capsys):
        job_that("is clean")

        with pytest.raises(SystemExit) as ended:
            Command().run_from_argv(["manage.py", "outbox_audit", f"{option}={length}"])

        assert ended.value.code == 2
        assert f"argument {option}: invalid seconds value: '{length}'" in capsys.readouterr().err

    def test_is_2_when_its_time_is_over(self, job_that):
        job_that("waits")

        said, code = audit("--time-limit", "1")

        assert (said, code) == ("The audit failed: it was stopped after 0:00:01.", 2)


class TestItsReport:
    def test_is_one_line_of_json_and_names_its_run(self, job_that):
        job_that("finds")

        said, _ = audit("--json")

        report = json.loads(said)
        assert report["findings"][0]["first"] == 7
        assert AuditRun.objects.get().pk == report["run"]

    def test_says_from_when_on_it_judged(self, job_that):
        job_that("is clean")

        said, _ = audit()

        assert said.startswith("As of 2026-11-20T03:00:00+00:00: messages published since 2026-11-14T03:00:00+00:00.\n")
        assert AuditRun.objects.get().since == datetime(2026, 11, 14, 3, tzinfo=UTC)

    @pytest.mark.parametrize(("does", "code"), [("finds", 1), ("is clean", 0), ("cannot", 2)])
    def test_leaves_nothing_in_the_database_where_it_is_told_so(self, job_that, does, code):
        job_that(does)

        assert audit("--no-store")[1] == code

        assert not AuditRun.objects.exists()


class TestItsVerdict:
    def test_is_written_to_a_file_that_verifies(self, job_that, key, tmp_path):
        job_that("finds")
        path = tmp_path / "verdict.json"

        audit("--verdict", str(path))
        said, code = audit("--verify", str(path))

        what = f"run {AuditRun.objects.get().pk}, as of 2026-11-20T03:00:00+00:00, 1 x lost at broker"
        assert (said, code) == (f"{path} is valid: {what}.\n", 0)

    @pytest.mark.parametrize(("old", "new"), [(b"false", b"true"), (b"\n", b"\r\n"), (b"orders", b"order\xff")])
    def test_is_refused_when_a_byte_was_changed(self, job_that, key, tmp_path, old, new):
        job_that("finds")
        path = tmp_path / "verdict.json"
        audit("--verdict", str(path))

        path.write_bytes(path.read_bytes().replace(old, new, 1))

        assert audit("--verify", str(path))[1] == 1

    def test_cannot_be_read_where_it_is_not(self, key, tmp_path):
        assert audit("--verify", str(tmp_path / "nowhere"))[1] == 2

    @pytest.mark.parametrize("option", ["--verdict", "--html"])
    def test_is_of_a_stored_run_only_as_its_page_is(self, option, job_that, tmp_path):
        job_that("finds")

        said, code = audit(option, str(tmp_path / "file"), "--no-store")

        assert (said, code) == ("Only a stored run has a verdict and a page. Leave out --no-store, or --verdict and --html.", 2)


@pytest.mark.spark
class TestWithoutJava:
    def test_it_says_what_to_install(self, monkeypatch, tmp_path):
        pytest.importorskip("pyspark")
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))

        said, code = audit()

        assert code == 2
        assert f"Spark needs Java 17 or newer, but JAVA_HOME is {tmp_path}, which has no bin/java." in said
        assert AuditRun.objects.get().error.startswith(said)


class TestItsPage:
    def test_leads_to_the_admin_if_it_knows_where_that_is(self, job_that, tmp_path):
        job_that("finds")
        file = tmp_path / "audit.html"

        _, code = audit("--html", str(file), "--site", "https://shop.example")

        finding = reverse("admin:outbox_pipeline_auditfinding_change", args=[AuditFinding.objects.get().pk])
        assert (code, '<base href="https://shop.example">' in file.read_text()) == (1, True)
        assert f'<a href="{finding}">' in file.read_text()

    def test_has_no_links_otherwise(self, job_that, tmp_path):
        job_that("finds")
        file = tmp_path / "audit.html"

        audit("--html", str(file))

        assert "lost: 2 x topic" in file.read_text()
        assert "<a " not in file.read_text()
