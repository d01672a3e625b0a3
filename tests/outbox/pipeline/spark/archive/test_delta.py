"""The lake as Delta tables, written and read by delta-rs."""

import pytest
from deltalake import DeltaTable

from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.lake.manifest import ManifestLake
from outbox.pipeline.spark.lake.open import open_lake
from tests.outbox.pipeline.spark.archive.conftest import FIRST, PER_DAY, SECOND
from tests.outbox.pipeline.spark.archive.looks import in_database, without_frame


@pytest.fixture
def lake(tmp_path):
    return open_lake(str(tmp_path / "lake"), "delta")


def read(lake, frame="messages", column="message_id"):
    table = DeltaTable(lake.root / frame).to_pyarrow_table()
    return sorted(table[column].to_pylist())


class TestADeltaTable:
    def test_has_each_row_once(self, archive, lake, ids):
        archive()

        assert read(lake) == ids
        assert read(lake, "inbox") == ids
        assert {str(day) for day in read(lake, column="day")} == {str(FIRST), str(SECOND)}

    def test_is_brought_up_to_date_after_a_crash_before_its_log(self, archive, lake, ids, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setattr(type(lake), "_follow", lambda self: None)
            archive(before=SECOND)
        assert ManifestLake(lake.root).committed() != []

        archive(before=SECOND)

        assert read(lake) == ids[:PER_DAY]

    def test_says_nothing_twice(self, archive, lake, ids):
        archive(before=SECOND)
        version = DeltaTable(lake.root / "messages").version()

        lake.insist_on_writing()

        assert DeltaTable(lake.root / "messages").version() == version
        assert read(lake) == ids[:PER_DAY]

    def test_takes_along_days_that_were_archived_by_an_older_version(self, archive, lake, ids, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setattr(type(lake), "_follow", lambda self: None)
            archive(before=SECOND)
        without_frame(lake, "recorded")

        archive()

        assert read(lake) == ids
        assert read(lake, "recorded", "pos") == [SECOND.day]

    def test_deletes_nothing_from_the_database_when_its_log_cannot_be_written(self, archive, lake, ids):
        lake.insist_on_writing()
        log = lake.root / "messages" / "_delta_log"
        for file in log.iterdir():
            file.write_text("no log")

        with pytest.raises(LakeError, match="Delta's log"):
            archive()

        assert in_database() == ids
