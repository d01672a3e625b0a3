"""`outbox_archive`, with its job as a process. None of these days needs Spark: nothing of them is written."""

import json
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from outbox import database
from outbox.database.locks import Lock
from tests.commands import refused, run

told = partial(run, "outbox_archive", "--database", "default")

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]  # the job has what Spark's extra installs


class TestTheCommand:
    def test_says_which_days_are_kept_and_why(self, held):
        text, code = told()

        assert code == 1
        assert text.splitlines() == [
            "Database 'default'",
            "  2001-02-03: kept: unfinished batches",
            "  2001-02-04: kept: unfinished batches",
        ]

    def test_says_the_same_as_json(self, held):
        text, code = told("--json")

        assert code == 1
        report = json.loads(text)["default"]
        assert report["kept"] == {"2001-02-03": "unfinished batches", "2001-02-04": "unfinished batches"}

    def test_leaves_days_alone_that_are_not_due(self, ids, with_archive, settings):
        archive = {"PATH": str(with_archive), "AFTER": timedelta(days=365 * 100)}
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"ARCHIVE": archive}}

        assert told() == ("Database 'default'\n  nothing is due\n", 0)

    def test_ends_with_2_while_another_archiver_is_at_work(self, ids, with_archive):
        with database.connect("default") as other:
            other.execute(f"SELECT pg_advisory_lock({Lock.ARCHIVE}, 0)")

            with refused(r"\(exit code 3\)\. Another archiver of this database is running"):
                told()

    def test_ends_with_2_where_the_lake_cannot_be_written(self, ids, with_archive):
        with_archive.write_text("a file where the folder should be")

        with refused("cannot be written"):
            told()

    def test_ends_with_2_and_says_what_to_install_where_there_is_no_java(self, ids, with_archive, monkeypatch, tmp_path):
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))

        with refused(r"\(exit code 2\)\. Spark needs Java 17 or newer, but JAVA_HOME is"):
            told()

    def test_ends_with_2_where_there_is_no_archive(self, ids):
        with refused(r'Set OUTBOX\["PIPELINE"\]\["ARCHIVE"\]'):
            told()

    def test_writes_what_a_cluster_needs_for_its_owner_only(self, ids, with_archive, tmp_path):
        file = tmp_path / "archive.json"
        file.touch(0o644)

        told("--write-config", str(file), "--master", "spark://there:7077")

        assert file.stat().st_mode & 0o777 == 0o600
        config = json.loads(file.read_text())
        assert config["lake"] == str(with_archive / "default")
        assert config["pipeline"]["master"] == "spark://there:7077"
        assert config["before"] == str((datetime.now(UTC) - timedelta(days=7)).date())

    def test_writes_what_a_cluster_needs_for_one_database_at_a_time(self, ids, with_archive, tmp_path):
        file = tmp_path / "archive.json"

        with refused(r"Name it with --database\. Choices are: default, other\."):
            told("--write-config", str(file), "--database", "other")

        assert not file.exists()
