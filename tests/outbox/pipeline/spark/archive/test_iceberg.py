"""The lake as Iceberg tables, written and read by pyiceberg."""

import signal
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from outbox import database
from outbox.models import Duplicate
from outbox.pipeline.job_config import database_source
from outbox.pipeline.spark.archive.config import ArchiveConfig
from outbox.pipeline.spark.archive.spark import SparkWriter
from outbox.pipeline.spark.config import PipelineConfig
from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.lake.frames import FRAMES
from outbox.pipeline.spark.lake.manifest import ManifestLake
from outbox.pipeline.spark.lake.open import open_lake
from tests.outbox.pipeline.spark.archive.conftest import BEFORE, FIRST, PER_DAY, SECOND
from tests.outbox.pipeline.spark.archive.looks import files_of, flip_a_bit, in_database, in_lake, without_frame
from tests.outbox.pipeline.spark.archive.tables import comes_back, read, rows_of, table_of
from tests.outbox.pipeline.spark.archive.test_crashes import run

pytestmark = pytest.mark.slow


@pytest.fixture
def lake(tmp_path):
    return open_lake(str(tmp_path / "lake"), "iceberg")


def bytes_of(lake):
    return {path: path.read_bytes() for path in files_of(lake)}


class TestAnIcebergTable:
    def test_has_each_row_once(self, archive, lake, ids):
        archive()

        assert read(lake) == ids
        assert read(lake, "inbox") == ids
        assert [len(rows_of(lake, name)) for name in ("delivery", "duplicate", "attempt", "check_back", "recorded")] == [2] * 5

    def test_has_the_rows_that_the_files_have(self, archive, lake, ids):
        archive()

        for name, frame in FRAMES.items():
            files = [lake.root / file for commit in lake.committed() for file in commit.frames[name].files]
            written = pa.concat_tables([pq.read_table(file) for file in files]).sort_by(frame.key[-1])
            assert rows_of(lake, name).cast(written.schema).equals(written)

    def test_says_of_each_snapshot_which_commit_it_is_of(self, archive, lake, ids):
        archive()

        summaries = [snapshot.summary.additional_properties for snapshot in table_of(lake).snapshots()]
        assert [(one["outbox.day"], one["outbox.attempt"]) for one in summaries] == [(str(FIRST), "1"), (str(SECOND), "1")]

    def test_lets_nobody_delete_files_of_the_lake(self, lake):
        lake.insist_on_writing()

        assert table_of(lake).properties["gc.enabled"] == "false"

    def test_says_nothing_twice(self, archive, lake, ids):
        archive(before=SECOND)
        written = {name: table_of(lake, name).metadata_location for name in FRAMES}

        lake.insist_on_writing()

        assert {name: table_of(lake, name).metadata_location for name in FRAMES} == written

    def test_takes_along_what_was_there_before_it(self, archive, lake, ids, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setattr(type(lake), "_follow", lambda self: None)
            archive()
        assert not (lake.root / "_iceberg").exists()

        archive()

        assert read(lake) == ids
        assert read(lake, "inbox") == ids

    def test_takes_along_days_that_were_archived_by_an_older_version(self, archive, lake, ids, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setattr(type(lake), "_follow", lambda self: None)
            archive(before=SECOND)
        without_frame(lake, "recorded")

        archive()

        assert read(lake) == ids
        assert read(lake, "recorded", "pos") == [SECOND.day]

    def test_gets_columns_that_are_new(self, archive, lake, ids, monkeypatch):
        frame = FRAMES["messages"]
        with monkeypatch.context() as patched:
            older = replace(frame, columns=tuple(column for column in frame.columns if column.name != "state"))
            patched.setitem(FRAMES, "messages", older)
            lake.insist_on_writing()
        assert "state" not in rows_of(lake).column_names

        archive()

        assert rows_of(lake)["state"].to_pylist() == ["sent"] * 2 * PER_DAY


class TestARowThatComesAgain:
    def test_counts_as_it_came_last(self, archive, lake, ids):
        archive(before=SECOND)
        before, files = rows_of(lake), bytes_of(lake)
        comes_back(ids[3])

        archive(before=SECOND)

        after = rows_of(lake)
        assert in_lake(lake).count(ids[3]) == 2
        assert after["message_id"].to_pylist() == ids[:PER_DAY]
        assert after["state"].to_pylist()[3] == "tombstone"
        others = pc.field("message_id") != ids[3]
        assert after.filter(others).equals(before.filter(others))
        assert files.items() <= bytes_of(lake).items()

    def test_counts_once_of_a_day_that_was_archived_again_as_a_whole(self, archive, lake, ids, monkeypatch):
        with database.connect("default") as reader, reader.transaction():  # it is committed, and cannot be deleted
            reader.execute("SELECT count(*) FROM outbox_message")
            archive(before=SECOND)
        with database.connect("default") as own:
            own.execute("UPDATE outbox_batch SET state = 5")

        archive(before=SECOND)

        assert [commit.name for commit in lake.committed()] == [f"{FIRST}.a1", f"{FIRST}.a2"]
        assert rows_of(lake)["message_id"].to_pylist() == ids[:PER_DAY]
        assert set(rows_of(lake)["state"].to_pylist()) == {"skipped"}
        assert not (lake.root / "_iceberg" / "left").exists()

    def test_counts_once_in_the_books_that_a_later_day_took_along(self, archive, lake, ids):
        with database.connect("default") as reader, reader.transaction():  # both days are committed, and neither is deleted
            reader.execute("SELECT count(*) FROM outbox_message")
            archive()
        assert len(in_lake(lake, "inbox")) == 3 * PER_DAY

        archive()

        assert read(lake) == ids
        assert read(lake, "inbox") == ids
        assert [len(rows_of(lake, name)) for name in ("delivery", "duplicate", "attempt", "check_back", "recorded")] == [2] * 5

    def test_is_another_one_where_only_its_number_comes_again(self, archive, lake, ids):
        archive(before=SECOND)
        (number,) = rows_of(lake, "duplicate")["id"].to_pylist()
        Duplicate.objects.update(id=number)  # as a database numbers them that was restored

        archive()

        assert read(lake, "duplicate", "id") == [number, number]

    def test_is_written_by_no_crash_twice(self, archive, lake, ids, monkeypatch):
        archive(before=SECOND)
        comes_back(ids[3])
        with monkeypatch.context() as patched:
            patched.setenv("OUTBOX_FAILPOINTS", "archive.after_table=raise")
            with pytest.raises(BaseException, match="after_table"):
                archive(before=SECOND)

        archive(before=SECOND)

        assert read(lake) == ids[:PER_DAY]

    def test_is_not_copied_from_a_file_of_which_a_bit_has_flipped(self, archive, lake, ids):
        archive(before=SECOND)
        file = next(path for path in files_of(lake) if ids[3] in pq.read_table(path)["message_id"].to_pylist())
        flip_a_bit(file)
        comes_back(ids[3])

        with pytest.raises(LakeError, match=f"The file {file} cannot be read: .* Bring it back from a copy of the lake"):
            archive(before=SECOND)

    def test_is_not_copied_from_a_copy_of_which_a_bit_has_flipped(self, archive, lake, ids):
        archive(before=SECOND)
        comes_back(ids[3])
        archive(before=SECOND)
        (copy,) = (lake.root / "_iceberg" / "left").iterdir()
        flip_a_bit(copy)
        comes_back(ids[4])

        with pytest.raises(LakeError, match=f"The file {copy} cannot be read: .* remove that folder"):
            archive(before=SECOND)


class TestACrash:
    def test_between_two_tables_is_made_good(self, url, lake, ids):
        died = run(url, lake, failpoint="after_table", kind="iceberg")

        assert died.returncode == -signal.SIGKILL, died.stderr
        assert (read(lake), read(lake, "inbox")) == (ids[:PER_DAY], [])
        assert in_database() == ids

        done = run(url, lake, kind="iceberg")

        assert done.returncode == 0, done.stderr
        assert (read(lake), read(lake, "inbox")) == (ids[:PER_DAY], ids[:PER_DAY])
        assert in_database() == ids[PER_DAY:]
        assert [commit.name for commit in lake.committed()] == [f"{FIRST}.a1"]

    def test_before_the_first_table_is_made_good(self, archive, lake, ids, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setattr(type(lake), "_follow", lambda self: None)
            archive(before=SECOND)
        assert ManifestLake(lake.root).committed() != []

        archive(before=SECOND)

        assert read(lake) == ids[:PER_DAY]


class TestSpark:
    def test_writes_files_that_a_table_can_have(self, spark, archive, lake, ids, caplog):
        config = ArchiveConfig(PipelineConfig(database_source("default", "python"), shuffle_partitions=2), str(lake.root), BEFORE)

        archive(before=SECOND, writer=SparkWriter(config), rows_per_part=100)

        assert read(lake) == ids[:PER_DAY]
        assert rows_of(lake)["created_at"].type == pa.timestamp("us", "UTC")
        assert rows_of(lake)["created_at"].to_pylist()[0] == datetime(2001, 2, 3, 6, tzinfo=UTC)
        assert rows_of(lake)["body"].to_pylist()[2] == b'{"n": 3}'
        assert "pyiceberg" not in caplog.text
