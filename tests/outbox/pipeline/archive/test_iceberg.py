"""The lake as Iceberg tables, written and read by pyiceberg."""

import shutil
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from sqlalchemy import URL

from outbox import database, partitions
from outbox.audit import database_source
from outbox.models import Duplicate
from outbox.pipeline.archive.config import ArchiveConfig
from outbox.pipeline.archive.spark import SparkWriter
from outbox.pipeline.config import PipelineConfig
from outbox.pipeline.errors import LakeError
from outbox.pipeline.lake.base import open_lake
from outbox.pipeline.lake.frames import FRAMES
from outbox.pipeline.lake.manifest import ManifestLake
from tests.outbox.pipeline.archive.conftest import BEFORE, FIRST, PER_DAY, SECOND
from tests.outbox.pipeline.archive.looks import in_database, in_lake
from tests.outbox.pipeline.archive.test_crashes import run


@pytest.fixture
def lake(tmp_path):
    return open_lake(str(tmp_path / "lake"), "iceberg")


def table_of(lake, frame="messages"):
    uri = URL.create("sqlite", database=str(lake.root / "_iceberg" / "catalog.db")).render_as_string()
    with SqlCatalog("outbox", uri=uri) as catalog:
        return catalog.load_table((lake.namespace, frame))


def rows_of(lake, frame="messages"):
    return table_of(lake, frame).scan().to_arrow().sort_by(FRAMES[frame].key[-1])


def read(lake, frame="messages", column="message_id"):
    return sorted(rows_of(lake, frame)[column].to_pylist())


def files_of(lake, frame="messages"):
    return {path: path.read_bytes() for path in (lake.root / frame).rglob("*.parquet")}


def comes_back(message):
    """Let a message that was archived be sent again, years later."""
    with database.connect("default") as own:
        partitions.make_day(own, FIRST)
        own.execute("INSERT INTO outbox_message (id, topic_id, body) VALUES (%s, 0, 'again')", [message])


class TestAnIcebergTable:
    def test_has_each_row_once(self, archive, lake, ids):
        archive()

        assert read(lake) == ids
        assert read(lake, "inbox") == ids
        assert [len(rows_of(lake, name)) for name in ("delivery", "duplicate", "attempt", "check_back")] == [2, 2, 2, 2]

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
        before, files = rows_of(lake), files_of(lake)
        comes_back(ids[3])

        archive(before=SECOND)

        after = rows_of(lake)
        assert in_lake(lake).count(ids[3]) == 2
        assert after["message_id"].to_pylist() == ids[:PER_DAY]
        assert after["state"].to_pylist()[3] == "tombstone"
        others = pc.field("message_id") != ids[3]
        assert after.filter(others).equals(before.filter(others))
        assert files.items() <= files_of(lake).items()

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
        assert [len(rows_of(lake, name)) for name in ("delivery", "duplicate", "attempt", "check_back")] == [2, 2, 2, 2]

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


class TestALakeThatWasMoved:
    @pytest.fixture
    def moved(self, archive, lake, ids, tmp_path):
        """It was archived into, also a message a second time, and lies elsewhere now."""
        archive(before=SECOND)
        comes_back(ids[3])
        archive(before=SECOND)
        shutil.copytree(lake.root, tmp_path / "elsewhere")
        return replace(lake, root=tmp_path / "elsewhere")

    @pytest.mark.parametrize("is_left_behind", [True, False], ids=["copied", "moved"])
    def test_is_refused_with_what_to_do(self, moved, lake, is_left_behind):
        if not is_left_behind:
            shutil.rmtree(lake.root)

        with pytest.raises(LakeError, match=r"all in .*/elsewhere/_iceberg is made .* If the lake was moved, .* remove"):
            moved.insist_on_writing()

    def test_has_its_tables_made_anew(self, moved, lake, ids):
        shutil.rmtree(lake.root)
        shutil.rmtree(moved.root / "_iceberg")

        moved.insist_on_writing()

        assert rows_of(moved)["message_id"].to_pylist() == ids[:PER_DAY]
        assert rows_of(moved)["state"].to_pylist()[3] == "tombstone"


class TestAFolder:
    def test_may_have_a_name_of_any_letters(self, archive, lake, ids, tmp_path):
        lake.root = tmp_path / "mein läke 100%20"

        archive()

        assert read(lake) == ids

    @pytest.mark.parametrize("name", ["lake#1", "lake?"])
    def test_whose_name_ends_a_uri_is_refused(self, archive, lake, ids, tmp_path, name):
        lake.root = tmp_path / name

        with pytest.raises(LakeError, match="needs another name"):
            archive()

        assert in_database() == ids


class TestACatalogOfOnesOwn:
    @pytest.fixture
    def catalog(self, tmp_path):
        (tmp_path / "warehouse").mkdir()
        uri = f"sqlite:///{tmp_path}/warehouse/catalog.db"
        return {"name": "ours", "type": "sql", "uri": uri, "warehouse": f"file://{tmp_path}/warehouse"}

    @pytest.fixture
    def lake(self, tmp_path, catalog):
        return open_lake(str(tmp_path / "lake"), "iceberg", catalog, "shop_default")

    @staticmethod
    def ids_in(catalog, namespace):
        with load_catalog(**catalog) as ours:
            return sorted(ours.load_table((namespace, "messages")).scan().to_arrow()["message_id"].to_pylist())

    def test_has_the_tables(self, archive, lake, ids, catalog):
        archive()

        assert self.ids_in(catalog, "shop_default") == ids
        assert not (lake.root / "_iceberg").exists()

    def test_has_those_of_several_lakes(self, archive, lake, ids, catalog, tmp_path):
        archive(before=SECOND)
        other = open_lake(str(tmp_path / "other"), "iceberg", catalog, "shop_second")
        other.insist_on_writing()

        assert self.ids_in(catalog, "shop_default") == ids[:PER_DAY]
        assert self.ids_in(catalog, "shop_second") == []

    def test_does_not_mix_two_lakes(self, archive, lake, ids, catalog, tmp_path):
        archive(before=SECOND)
        other = open_lake(str(tmp_path / "other"), "iceberg", catalog, "shop_default")

        with pytest.raises(LakeError, match=r"shop_default\.messages is of .*/lake, not .*/other\. .* another NAMESPACE"):
            other.insist_on_writing()

    def test_gets_those_of_a_moved_lake_anew(self, archive, lake, ids, catalog, tmp_path):
        archive(before=SECOND)
        moved = replace(lake, root=lake.root.rename(tmp_path / "elsewhere"))
        with pytest.raises(LakeError, match="If the lake was moved, drop those of the namespace 'shop_default'"):
            moved.insist_on_writing()

        with load_catalog(**catalog) as ours:
            for table in ours.list_tables("shop_default"):
                ours.drop_table(table)
        moved.insist_on_writing()

        assert self.ids_in(catalog, "shop_default") == ids[:PER_DAY]

    def test_that_fails_loses_nothing(self, archive, lake, ids, catalog, tmp_path):
        lake.insist_on_writing()
        file = tmp_path / "warehouse" / "catalog.db"
        kept = file.read_bytes()
        file.write_text("no catalog")
        with pytest.raises(LakeError, match=r"Iceberg tables of .* cannot be written: DatabaseError: .* Nothing is lost"):
            archive()
        assert in_database() == ids

        file.write_bytes(kept)
        archive()

        assert self.ids_in(catalog, "shop_default") == ids
        assert in_database() == []

    def test_that_fails_between_manifest_and_tables_loses_nothing(self, archive, lake, ids, catalog, monkeypatch):
        def fail(self, *arguments):
            raise CommitFailedException("somebody else was faster")

        with monkeypatch.context() as patched:
            patched.setattr(SqlCatalog, "commit_table", fail)
            with pytest.raises(LakeError, match="somebody else was faster"):
                archive()
        assert [commit.name for commit in lake.committed()] == [f"{FIRST}.a1"]
        assert in_database() == ids

        archive()

        assert self.ids_in(catalog, "shop_default") == ids
        assert in_database() == []


class TestPyiceberg:
    @pytest.mark.parametrize("missing", ["pyiceberg.catalog", "sqlalchemy"])
    def test_that_is_missing_is_asked_for(self, archive, lake, ids, monkeypatch, missing):
        monkeypatch.setitem(sys.modules, missing, None)

        with pytest.raises(LakeError, match=r'pip install "django-transactional-outbox\[iceberg\]"'):
            archive()

        assert in_database() == ids


class TestSpark:
    def test_writes_files_that_a_table_can_have(self, spark, archive, lake, ids, caplog):
        config = ArchiveConfig(PipelineConfig(database_source("default", "python"), shuffle_partitions=2), str(lake.root), BEFORE)

        archive(before=SECOND, writer=SparkWriter(config), rows_per_part=100)

        assert read(lake) == ids[:PER_DAY]
        assert rows_of(lake)["created_at"].type == pa.timestamp("us", "UTC")
        assert rows_of(lake)["created_at"].to_pylist()[0] == datetime(2001, 2, 3, 6, tzinfo=UTC)
        assert rows_of(lake)["body"].to_pylist()[2] == b'{"n": 3}'
        assert "pyiceberg" not in caplog.text
