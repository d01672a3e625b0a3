"""A lake that lost a manifest: nothing is made of it that cannot be made good by bringing it back."""

import pytest

from outbox import database, partitions
from outbox.pipeline.errors import LakeError
from tests.outbox.pipeline.archive.conftest import FIRST, PER_DAY, SECOND
from tests.outbox.pipeline.archive.looks import in_lake, state_of


@pytest.fixture
def committed(archive, ids):
    """The first day is in the lake, and could not leave the database."""
    with database.connect("default") as reader, reader.transaction():
        reader.execute("SELECT count(*) FROM outbox_message")
        archive(before=SECOND)


def lose(lake, attempt=1):
    """Take a manifest away; give a function that brings it back."""
    path = lake.root / "_manifests" / f"{FIRST}.a{attempt}.json"
    text = path.read_text()
    path.unlink()
    return lambda: path.write_text(text)


class TestADayWhoseManifestIsLost:
    def test_is_not_archived_anew_where_it_was_committed(self, archive, committed, lake, ids):
        with database.connect("default") as own:
            partitions.drop_day(own, FIRST, unless=lambda: False)  # as older versions of prune did
        bring_back = lose(lake)

        with pytest.raises(LakeError, match=r"has no 2001-02-03\.a1, which was archived there"):
            archive(before=SECOND)

        bring_back()
        archive(before=SECOND)
        assert in_lake(lake) == ids[:PER_DAY]
        assert state_of(FIRST) == ("deleted", 1, PER_DAY)
