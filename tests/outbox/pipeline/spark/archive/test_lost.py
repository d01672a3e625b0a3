"""A lake that lost a manifest: nothing is made of it that cannot be made good by bringing it back."""

import pytest

from outbox import database
from outbox.database import partitions
from outbox.pipeline.models import ArchivedDay
from outbox.pipeline.spark import LakeError
from tests.outbox.pipeline.spark.archive.conftest import FIRST, PER_DAY, SECOND
from tests.outbox.pipeline.spark.archive.looks import in_lake, state_of


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


def files(lake, attempt):
    return list((lake.root / "messages" / str(FIRST) / f"a{attempt}").iterdir())


def comes_back(message):
    """Let a message that was archived be sent again, years later."""
    with database.connect("default") as own:
        partitions.create_partition(own, FIRST)
        own.execute("INSERT INTO outbox_message (id, topic_id, body) VALUES (%s, 0, 'again')", [message])


class TestADayWhoseManifestIsLost:
    def test_is_not_archived_anew_where_it_was_committed(self, archive, committed, lake, ids):
        with database.connect("default") as own:
            partitions.drop_partition(own, FIRST, unless=lambda: False)  # as older versions of prune did
        lose(lake)

        with pytest.raises(LakeError, match=r"lacks 2001-02-03\.a1, which was archived there"):
            archive(before=SECOND)

        (lake.root / "_manifests" / f"{FIRST}.a1.json").write_text(ArchivedDay.objects.get(day=FIRST).manifest)
        archive(before=SECOND)
        assert in_lake(lake) == ids[:PER_DAY]
        assert state_of(FIRST) == ("deleted", 1, PER_DAY)

    def test_keeps_its_files_where_a_later_attempt_follows(self, archive, lake, ids):
        archive(before=SECOND)
        comes_back(ids[0])
        archive(before=SECOND)
        bring_back = lose(lake, 1)
        comes_back(ids[1])

        archive(before=SECOND)

        bring_back()
        assert sorted(in_lake(lake)) == sorted([*ids[:PER_DAY], *ids[:2]])

    def test_keeps_its_files_where_the_database_forgot_it_too(self, archive, committed, lake, ids):
        lose(lake)
        ArchivedDay.objects.all().delete()

        done = archive(before=SECOND)

        assert done.abandoned == []
        assert files(lake, 1)
        assert state_of(FIRST) == ("deleted", 2, PER_DAY)
