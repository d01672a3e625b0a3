"""Where a lake and its Iceberg tables are: moved, oddly named, in a catalog of one's own, or nowhere."""

import shutil
import sys
from dataclasses import replace

import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException

from outbox.pipeline.spark.errors import LakeError
from outbox.pipeline.spark.lake.open import open_lake
from tests.outbox.pipeline.spark.archive.conftest import FIRST, PER_DAY, SECOND
from tests.outbox.pipeline.spark.archive.looks import in_database
from tests.outbox.pipeline.spark.archive.tables import comes_back, read, rows_of


@pytest.fixture
def lake(tmp_path):
    return open_lake(str(tmp_path / "lake"), "iceberg")


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
    def test_that_is_missing_is_asked_for_before_anything_is_written(self, tmp_path, ids, monkeypatch, missing):
        monkeypatch.delitem(sys.modules, "outbox.pipeline.spark.lake.iceberg", raising=False)  # as in a process that begins
        monkeypatch.setitem(sys.modules, missing, None)

        with pytest.raises(LakeError, match=r'pip install "django-transactional-outbox\[iceberg\]"'):
            open_lake(str(tmp_path / "lake"), "iceberg")

        assert not (tmp_path / "lake").exists()
        assert in_database() == ids
