"""From when on a database and its lake hold all that there was. No Spark."""

from datetime import UTC, date, datetime, timedelta

import pytest

from outbox.pipeline.spark import LakeError
from outbox.pipeline.spark.lake import Commit, WrittenFrame, complete_since

DAY = timedelta(days=1)
KEPT = 7 * DAY
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
LIVE = NOW - 6 * DAY  # what the database alone has


def day(n):
    """Return the day so many days ago."""
    return (NOW - n * DAY).date()


def archived(first, last, **rows):
    """Return the commits of days, each written when it was due."""
    return [
        commit(n, datetime.combine(day(n), datetime.min.time(), UTC) + DAY + KEPT, **rows) for n in range(first, last - 1, -1)
    ]


def commit(n, written_at, *, messages=5, inbox=5, **more):
    rows = {"messages": messages, "inbox": inbox, **more}
    frames = {name: WrittenFrame(many, "0") for name, many in rows.items()}
    return Commit(str(day(n)), 1, "us", frames, written_at.isoformat() if written_at else "")


def since(commits, *, born=365, there=8, also=(), **frames):
    """Ask it of a database that has the last days, and was made so many days ago."""
    days = [*(day(n) for n in range(there, -1, -1)), *(date.fromisoformat(one.day) for one in commits), *also]
    return complete_since(commits, days, installed_at=NOW - born * DAY, retention=KEPT, database_since=LIVE, **frames)


class TestADatabaseAndItsLake:
    def test_hold_everything_where_the_archive_began_before_anything_was_pruned(self):
        assert since(archived(30, 9), born=30) is None

    def test_hold_everything_where_the_first_days_were_empty(self):
        assert since([*archived(30, 28, messages=0, inbox=0), *archived(27, 9)], born=30) is None

    def test_hold_everything_where_nothing_was_old_enough_to_be_pruned_when_the_archive_began(self):
        assert since([commit(8, NOW - 2 * DAY, inbox=0)], born=8) is None

    def test_do_not_know_of_the_first_days_where_those_have_messages_that_nobody_handled(self):
        commits = [*archived(30, 28, inbox=0), *archived(27, 9)]

        assert since(commits, born=30) == datetime.combine(day(22), datetime.min.time(), UTC)

    def test_hold_of_what_was_recorded_what_came_after_a_version_began_to_archive_it(self):
        commits = [*archived(30, 20), *archived(19, 9, recorded=5)]

        assert since(commits, born=30) is None
        assert since(commits, born=30, frames=["recorded"]) == datetime.combine(day(11), datetime.min.time(), UTC)

    def test_hold_all_that_was_recorded_where_that_was_archived_from_the_first_day(self):
        assert since(archived(30, 9, recorded=5), born=30, frames=["recorded"]) is None

    def test_hold_what_came_after_the_archive_began_where_rows_may_have_been_pruned_before(self):
        assert since(archived(30, 9)) == datetime.combine(day(22), datetime.min.time(), UTC)

    def test_hold_no_more_than_the_database_where_nothing_was_archived(self):
        assert since([]) == LIVE

    def test_hold_no_less_than_the_database_where_the_archive_is_new(self):
        assert since([commit(8, NOW)], there=7) == LIVE

    def test_begin_anew_behind_a_day_that_was_dropped_while_there_was_no_archive(self):
        commits = [*archived(30, 20), *archived(18, 9)]

        assert since(commits, born=30) == datetime.combine(day(10), datetime.min.time(), UTC)

    def test_do_not_miss_a_day_that_the_database_still_has(self):
        commits = [*archived(30, 20), *archived(18, 9)]

        assert since(commits, born=30, also=[day(19)]) is None

    def test_hold_no_more_than_the_database_where_the_days_between_were_dropped(self):
        assert since(archived(60, 50), born=60) == LIVE

    def test_do_not_know_of_the_first_days_where_the_lake_begins_later(self):
        assert since(archived(27, 9), born=30) == datetime.combine(day(19), datetime.min.time(), UTC)

    def test_do_not_know_of_the_first_day_where_it_was_dropped_before_there_was_an_archive(self):
        assert since([], born=8, there=7) == LIVE
        assert since([commit(7, NOW)], born=8, there=6) == LIVE

    @pytest.mark.parametrize("frames", [{}, {"frames": ["recorded"]}])
    def test_do_not_hold_what_may_have_been_pruned_of_a_first_day_that_was_never_archived(self, frames):
        assert since([], born=8, **frames) == LIVE

    def test_cannot_tell_where_a_manifest_does_not_say_when_it_was_written(self):
        with pytest.raises(LakeError, match=r"The manifest 2026-02-20\.a1 does not say when it was written"):
            since([commit(9, None)])
