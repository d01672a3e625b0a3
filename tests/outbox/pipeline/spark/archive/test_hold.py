"""A lake that is asked while the database's days are held: what is wrong with it is said before anything is judged."""

import os
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from outbox import database
from outbox.pipeline.spark import LakeError
from outbox.pipeline.spark.archived import LATEST_TIME, LakeSnapshot, broker_spans, snapshot_lake
from outbox.pipeline.spark.config import Archived, PipelineConfig, Source
from outbox.pipeline.spark.history import RecordedTimes
from outbox.pipeline.spark.statements import exported_snapshot
from tests.outbox.pipeline.spark.archive.conftest import FIRST, PER_DAY, SECOND
from tests.outbox.pipeline.spark.archive.looks import in_database, in_lake


@pytest.fixture
def held(url, lake):
    @contextmanager
    def held():
        with exported_snapshot(url) as (connection, _):
            yield snapshot_lake(connection, Archived(str(lake.root), datetime.now(UTC), 7 * 86400.0, None), None)

    return held


class TestWhatIsKnownOfBrokers:
    MOMENTS = [datetime(2026, 1, day, tzinfo=UTC) for day in range(1, 6)]

    def known(self, lake, *, live_since, recorded_since):
        began, _, late, until, _ = self.MOMENTS
        archived = Archived(str(lake.root), began, 7 * 86400.0, live_since)
        config = PipelineConfig(Source("x"), seen_topics=["orders", "bills", "notes"], recorded={"bills": 0.0, "notes": 0.0})
        recorded = {"bills": RecordedTimes(began, until), "notes": RecordedTimes(late, None)}
        return broker_spans(config, LakeSnapshot(archived, lake, [], set(), True, None, recorded_since), recorded)

    def test_is_all_that_was_recorded_and_in_their_own_tables_what_is_not_pruned(self, lake):
        began, _, late, until, live = self.MOMENTS

        known = self.known(lake, live_since=live, recorded_since=None)

        assert known == {
            "orders": RecordedTimes(live, LATEST_TIME),
            "bills": RecordedTimes(began, until),
            "notes": RecordedTimes(late, None),
        }

    def test_begins_where_recorded_rows_are_archived(self, lake):
        _, later, late, until, live = self.MOMENTS

        known = self.known(lake, live_since=live, recorded_since=later)

        assert known == {
            "orders": RecordedTimes(live, LATEST_TIME),
            "bills": RecordedTimes(later, until),
            "notes": RecordedTimes(late, None),
        }

    def test_is_everything_where_nothing_was_ever_pruned(self, lake):
        began, _, late, until, _ = self.MOMENTS

        known = self.known(lake, live_since=None, recorded_since=None)

        assert known == {"bills": RecordedTimes(began, until), "notes": RecordedTimes(late, None)}


def manifest(lake):
    return next((lake.root / "_manifests").iterdir())


class TestALakeThatIsHeld:
    def test_lets_no_day_leave_the_database_meanwhile(self, archive, held, lake, ids):
        with held() as found:
            assert found.commits == []
            assert archive(before=SECOND).kept == {str(FIRST): "open transactions"}
            assert in_database() == ids

        assert archive(before=SECOND).days == {str(FIRST): PER_DAY}

    def test_knows_which_days_the_database_may_still_have(self, archive, held, ids):
        with database.connect("default") as reader, reader.transaction():
            reader.execute("SELECT FROM outbox_message")
            archive(before=SECOND)
            with held() as found:
                assert found.unsettled == {str(FIRST)}
        archive(before=SECOND)

        with held() as found:
            assert found.unsettled == set()

    def test_is_refused_where_it_is_another_databases(self, archive, held, ids):
        archive(before=SECOND)
        with database.connect("default") as own:
            own.execute("UPDATE outbox_source SET id = 'urn:uuid:other'")

        with pytest.raises(LakeError, match="belongs to database"), held():
            pass

    def test_is_refused_where_a_day_is_gone(self, archive, held, lake, ids):
        archive(before=SECOND)
        manifest(lake).unlink()

        with pytest.raises(LakeError, match=r"lacks 2001-02-03\.a1, which was archived there"), held():
            pass

    def test_is_refused_where_a_day_is_gone_that_the_database_may_still_have(self, archive, held, lake, ids):
        with database.connect("default") as reader, reader.transaction():
            reader.execute("SELECT FROM outbox_message")
            archive(before=SECOND)
        manifest(lake).unlink()

        with pytest.raises(LakeError, match=r"lacks 2001-02-03\.a1, which was archived there"), held():
            pass

    def test_is_refused_where_a_manifest_cannot_be_read(self, archive, held, lake, ids):
        archive(before=SECOND)
        manifest(lake).write_text("{")

        with pytest.raises(LakeError, match=r"The manifest .* cannot be read"), held():
            pass

    @pytest.mark.parametrize(
        ("spoil", "said"),
        [(os.unlink, "cannot be read: No such file"), (lambda path: os.truncate(path, 100), "has 100 bytes instead of")],
        ids=["missing", "cut short"],
    )
    def test_is_refused_where_a_file_is_not_whole(self, archive, held, lake, ids, spoil, said):
        archive(before=SECOND)

        for frame in ("messages", "inbox", "failed_delivery", "duplicate", "recorded"):
            assert in_lake(lake, frame)
            file = next(iter(lake.committed()[0].frames[frame].files))
            whole = (lake.root / file).read_bytes()
            spoil(lake.root / file)

            with pytest.raises(LakeError, match=rf"The file {file} .*{said}"), held():
                pass

            (lake.root / file).write_bytes(whole)
