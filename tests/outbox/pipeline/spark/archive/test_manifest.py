"""The lake by itself."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from outbox.pipeline.spark import AlreadyCommitted, LakeError
from outbox.pipeline.spark.lake import Commit, Lake, WrittenFrame


@pytest.fixture
def lake(tmp_path):
    return Lake(tmp_path / "lake")


def commit_of(lake, attempt=1, day="2001-02-03", content=b"rows"):
    file = f"messages/{day}/a{attempt}/part-0.parquet"
    (lake.root / file).parent.mkdir(parents=True, exist_ok=True)
    (lake.root / file).write_bytes(content)
    return Commit(day, attempt, "urn:uuid:ours", {"messages": WrittenFrame(1, "7", {file: len(content)})})


class TestACommit:
    def test_is_read_as_it_was_made(self, lake):
        commit = commit_of(lake)

        lake.commit(commit)

        assert lake.committed() == [commit]

    def test_is_not_there_before_it_was_made(self, lake):
        commit_of(lake)

        assert lake.committed() == []

    def test_is_made_once(self, lake):
        lake.commit(commit_of(lake))

        with pytest.raises(AlreadyCommitted, match=r"already has 2001-02-03\.a1"):
            lake.commit(commit_of(lake))

    def test_is_made_once_by_one_of_many(self, lake):
        def try_it(number):
            commit = Commit("2001-02-03", 1, f"urn:uuid:{number}", {})
            try:
                lake.commit(commit)
            except AlreadyCommitted:
                return None
            return commit

        lake.require_writable()
        with ThreadPoolExecutor(8) as pool:
            made = [commit for commit in pool.map(try_it, range(32)) if commit]

        assert lake.committed() == made

    def test_leaves_no_file_behind_but_its_manifest(self, lake):
        lake.require_writable()
        lake.commit(commit_of(lake))

        assert [path.name for path in (lake.root / "_manifests").iterdir()] == ["2001-02-03.a1.json"]

    def test_of_files_that_are_not_there_is_none(self, lake):
        commit = Commit("2001-02-03", 1, "ours", {"messages": WrittenFrame(1, "7", {"messages/nothing.parquet": 4})})

        with pytest.raises(LakeError, match=r"cannot be committed .*messages/nothing\.parquet"):
            lake.commit(commit)

        assert lake.committed() == []

    def test_that_somebody_stopped_writing_does_not_count(self, lake):
        lake.require_writable()
        (lake.root / "_manifests" / ".2001-02-03.a1-k3j2").write_text('{"day": "2001-')

        assert lake.committed() == []


class TestAManifest:
    def test_that_was_changed_is_named(self, lake):
        lake.commit(commit_of(lake))
        (lake.root / "_manifests" / "2001-02-03.a1.json").write_text('{"day": "2001-')

        with pytest.raises(LakeError, match=r"The manifest .*2001-02-03\.a1\.json cannot be read"):
            lake.committed()

    def test_says_which_file_is_gone(self, lake):
        commit = commit_of(lake)
        lake.commit(commit)
        (lake.root / "messages/2001-02-03/a1/part-0.parquet").unlink()

        with pytest.raises(LakeError, match=r"The file .* of 2001-02-03\.a1 in the lake in .* cannot be read: No such file"):
            lake.require_files(commit)

    def test_says_which_file_is_cut_short(self, lake):
        commit = commit_of(lake)
        lake.commit(commit)
        (lake.root / "messages/2001-02-03/a1/part-0.parquet").write_bytes(b"ro")

        with pytest.raises(LakeError, match="has 2 bytes instead of 4"):
            lake.require_files(commit)
