"""The steps of the archive, with a writer in plain Python."""

import os
import shutil
from datetime import UTC, datetime, time, timedelta

import pytest

from outbox import database
from outbox.consuming.deferred_housekeeping import tidy
from outbox.database import partitions
from outbox.database.locks import Lock
from outbox.models import Batch, DeadMessage, Duplicate, Inbox, State
from outbox.pipeline.models import ArchivedDay
from outbox.pipeline.spark import ArchiverBusy, LakeError, records
from outbox.pipeline.spark import archiver as delete
from outbox.pipeline.spark.lake import TIMED_FRAMES, Lake
from outbox.relay.maintenance import prune
from outbox.testing.factories import DeferredFactory
from tests.factories import BatchFactory, MessageRowFactory, TicketFactory, message_id
from tests.outbox.pipeline.spark.archive.arrow import ArrowWriter
from tests.outbox.pipeline.spark.archive.conftest import FIRST, PER_DAY, SECOND
from tests.outbox.pipeline.spark.archive.looks import books_left, in_database, in_lake, state_of, without_frame


def late(day=FIRST, **fields):
    moment = datetime.combine(day, time(), tzinfo=UTC)
    return MessageRowFactory(id=message_id(moment + timedelta(hours=20)), **fields)


class TestTheArchive:
    def test_moves_days_and_their_books_from_the_database_to_the_lake_once(self, archive, lake, ids):
        done = archive()

        assert done.days == {str(FIRST): PER_DAY, str(SECOND): PER_DAY}
        assert in_lake(lake) == ids
        assert in_database() == []
        assert state_of(FIRST) == ("deleted", 1, PER_DAY)
        assert in_lake(lake, column="state") == ["sent"] * 2 * PER_DAY
        assert in_lake(lake, column="number") == [*range(1, PER_DAY + 1)] * 2
        assert in_lake(lake, column="key")[0] == "Zoë 1"
        assert in_lake(lake, column="body")[2] == b'{"n": 3}'
        assert books_left() == dict.fromkeys(TIMED_FRAMES, 0)
        assert sorted(in_lake(lake, "inbox")) == ids
        assert {name: len(in_lake(lake, name, "topic" if name != "failed_send" else "reason")) for name in TIMED_FRAMES} == {
            "inbox": 2 * PER_DAY,
            **dict.fromkeys(["failed_delivery", "duplicate", "failed_send", "operator_act", "check_back", "recorded"], 2),
        }

        assert archive().days == {}
        assert in_lake(lake) == ids

    def test_leaves_younger_days_alone(self, archive, lake, ids):
        archive(before=SECOND)

        assert in_lake(lake) == ids[:PER_DAY]
        assert in_database() == ids[PER_DAY:]
        assert books_left()["inbox"] == PER_DAY

    def test_takes_tombstones_and_dead_messages_that_have_a_copy(self, archive, lake, ids):
        tombstone, dead = late(topic_id=0, body=b""), late()
        batch = BatchFactory(message_ids=[dead.id], state=State.DEAD)
        DeadMessage.objects.create(message_id=dead.id, batch_id=batch.id, topic="t", body=b"x", reason="refused")

        archive(before=SECOND)

        states = dict(zip(in_lake(lake), in_lake(lake, column="state"), strict=True))
        assert (states[str(tombstone.id)], states[str(dead.id)]) == ("tombstone", "dead")

    def test_archives_a_day_once_more_when_a_dead_message_of_it_came_back(self, archive, lake, ids):
        archive(before=SECOND)
        with database.connect("default") as own:
            partitions.create_partition(own, FIRST)
        again = late()
        BatchFactory(message_ids=[again.id], state=State.SENT)

        archive(before=SECOND)

        assert in_lake(lake) == [*ids[:PER_DAY], str(again.id)]
        assert state_of(FIRST) == ("deleted", 2, 1)


class TestAnUnfinishedDay:
    @pytest.mark.parametrize(
        ("hold", "reason"),
        [
            (lambda message: TicketFactory(message=message), "waiting messages"),
            (lambda message: BatchFactory(message_ids=[message.id], state=State.CLAIMED), "unfinished batches"),
            (lambda message: BatchFactory(message_ids=[message.id], state=State.RELEASED), "unfinished batches"),
            (lambda message: BatchFactory(message_ids=[message.id], state=State.DEAD), "dead messages without a copy"),
        ],
        ids=["waiting", "claimed", "released", "dead"],
    )
    def test_is_kept_with_the_reason(self, archive, lake, ids, hold, reason):
        hold(late())

        done = archive()

        assert done.kept == {str(FIRST): reason}
        assert in_lake(lake) == ids[PER_DAY:]
        assert ArchivedDay.objects.count() == 1

    def test_is_kept_when_it_becomes_so_after_the_commit(self, archive, lake, ids):
        batch = BatchFactory(message_ids=[late().id], state=State.SENT)

        class Retried(ArrowWriter):
            def verify(self, frame, files):
                TicketFactory(message=type("Row", (), {"id": batch.message_ids[0], "topic_id": 1})())
                return super().verify(frame, files)

        done = archive(before=SECOND, writer=Retried(database_url()))

        assert done.kept == {str(FIRST): "waiting messages"}
        assert state_of(FIRST)[0] == "committed"
        assert len(in_database()) == 2 * PER_DAY + 1
        assert books_left()["inbox"] == 2 * PER_DAY

    def test_is_kept_while_open_transactions_read_it(self, archive, ids):
        with database.connect("default") as reader, reader.transaction():
            reader.execute("SELECT count(*) FROM outbox_message")

            done = archive(before=SECOND)

            assert done.kept == {str(FIRST): "open transactions"}

        assert archive(before=SECOND).days == {str(FIRST): PER_DAY}

    def test_is_kept_while_a_handled_message_of_it_is_deferred_still(self, archive, ids):
        DeferredFactory(consumer_group="cart", message_id=ids[0], dead=True)

        assert list(archive(before=SECOND).kept) == [str(FIRST)]
        assert books_left()["inbox"] == 2 * PER_DAY

        tidy("default")
        assert archive(before=SECOND).days == {str(FIRST): PER_DAY}


def database_url():
    from outbox.pipeline.job_config import database_source

    return database_source("default").url


class TestADayThatChanges:
    def change(self, writer, act):
        class Changing(ArrowWriter):
            def verify(self, frame, files):
                if frame.name == "messages" and not done:
                    done.append(act())
                return super().verify(frame, files)

        done = []
        return Changing(database_url())

    def test_is_archived_again_with_the_message_that_came(self, archive, lake, ids):
        done = archive(before=SECOND, writer=self.change(ArrowWriter, late))

        assert done.days == {str(FIRST): PER_DAY + 1}
        assert len(set(in_lake(lake))) == PER_DAY + 1
        assert state_of(FIRST) == ("deleted", 2, PER_DAY + 1)

    def test_is_archived_again_when_a_message_comes_to_another_end(self, archive, lake, ids):
        def act():
            with database.connect("default") as own:
                own.execute("UPDATE outbox_batch SET state = 5")

        archive(before=SECOND, writer=self.change(ArrowWriter, act))

        assert in_lake(lake, column="state") == ["sent"] * PER_DAY + ["discarded"] * PER_DAY

    def test_is_archived_again_when_a_dead_message_was_sent_again_before_prune_came(self, archive, lake, ids, settings):
        settings.OUTBOX = {**settings.OUTBOX, "PIPELINE": {"ARCHIVE": {"PATH": str(lake.root.parent)}}}
        dead, now = late(), datetime(2001, 2, 20, tzinfo=UTC)
        batch = BatchFactory(message_ids=[dead.id], state=State.DEAD)
        DeadMessage.objects.create(message_id=dead.id, batch_id=batch.id, topic="t", body=b"x", reason="refused")
        with database.connect("default") as reader, reader.transaction():
            reader.execute("SELECT count(*) FROM outbox_message")
            archive(before=SECOND)
        Batch.objects.filter(id=batch.id).update(state=State.SENT, sent_at=now)

        prune("default", now=now)
        archive(before=SECOND)

        states = dict(zip(in_lake(lake), in_lake(lake, column="state"), strict=True))
        assert states[str(dead.id)] == "sent"
        assert state_of(FIRST) == ("deleted", 2, PER_DAY + 1)

    def test_is_archived_again_with_the_row_that_came_into_the_books(self, archive, lake, ids):
        def act():
            moment = datetime(2001, 2, 3, 1, tzinfo=UTC)
            Duplicate.objects.create(consumer_group="late", message_id=ids[0], topic="t", delivery_count=9, dropped_at=moment)

        archive(before=SECOND, writer=self.change(ArrowWriter, act))

        assert set(in_lake(lake, "duplicate", "consumer_group")) == {"cart", "late"}
        assert books_left()["duplicate"] == 1

    def test_is_archived_again_with_the_message_that_came_at_the_last_moment(self, archive, lake, ids, monkeypatch):
        drop, came = delete.drop, []

        def drop_late(*arguments):
            came or came.append(late())
            drop(*arguments)

        monkeypatch.setattr(delete, "drop", drop_late)
        archive(before=SECOND)

        assert str(came[0].id) in in_lake(lake)
        assert state_of(FIRST) == ("deleted", 2, PER_DAY + 1)

    def test_that_keeps_changing_is_kept(self, archive, ids):
        class Always(ArrowWriter):
            def verify(self, frame, files):
                if frame.name == "messages":
                    late()
                return super().verify(frame, files)

        done = archive(before=SECOND, writer=Always(database_url()))

        assert "it changed while it was archived" in done.kept[str(FIRST)]
        assert len(in_database()) == 2 * PER_DAY + 2


class TestWhatWasWritten:
    def test_is_held_to_what_was_read(self, archive, lake, ids):
        class Losing(ArrowWriter):
            def write(self, frame, queries, snapshot, folder, row_bytes):
                super().write(frame, queries[:1], snapshot, folder, row_bytes)

        with pytest.raises(
            LakeError, match=r"The files of messages in .* differ from the rows that were read: 3 rows instead of 8"
        ):
            archive(writer=Losing(database_url()))

        assert lake.committed() == []
        assert in_database() == ids

    def test_is_held_to_it_row_by_row(self, archive, lake, ids):
        class Garbling(ArrowWriter):
            def verify(self, frame, files):
                rows, digest = super().verify(frame, files)
                return rows, str(int(digest) + 1)

        with pytest.raises(LakeError, match="or other values"):
            archive(writer=Garbling(database_url()))

        assert in_database() == ids


class TestALake:
    def test_of_a_folder_that_is_not_there_is_empty(self, tmp_path):
        assert Lake(tmp_path / "nowhere").committed() == []

    def test_that_cannot_be_written_is_refused_before_anything_is_read(self, archive, lake, ids):
        lake.root.write_text("a file where the folder should be")

        with pytest.raises(LakeError, match=r"cannot be written"):
            archive()

        assert ArchivedDay.objects.count() == 0
        assert in_database() == ids

    def test_of_another_database_is_refused(self, archive, lake, ids):
        archive(before=SECOND)
        with database.connect("default") as own:
            own.execute("UPDATE outbox_source SET id = id || '.other'")

        with pytest.raises(LakeError, match="belongs to database"):
            archive()

    def test_that_lost_a_day_is_refused(self, archive, lake, ids):
        archive(before=SECOND)
        shutil.rmtree(lake.root)

        with pytest.raises(
            LakeError, match=r"lacks 2001-02-03.a1, which was archived there. Check that the right folder is mounted"
        ):
            archive()

        assert in_database() == ids[PER_DAY:]

    def test_whose_files_went_after_the_commit_deletes_nothing(self, archive, lake, ids):
        with database.connect("default") as reader, reader.transaction():
            reader.execute("SELECT count(*) FROM outbox_message")
            archive(before=SECOND)
        file = next(iter(lake.committed()[0].frames["messages"].files))
        os.truncate(lake.root / file, 100)

        with pytest.raises(LakeError, match=rf"The file {file} of 2001-02-03.a1 .* has 100 bytes instead of"):
            archive(before=SECOND)

        assert in_database() == ids


class TestAnArchiver:
    def test_is_alone(self, archive, ids, monkeypatch):
        monkeypatch.setattr(records, "SET_LOCK_TIMEOUT", "SET lock_timeout = '100ms'")
        with database.connect("default") as other:
            other.execute(f"SELECT pg_advisory_lock({Lock.ARCHIVE}, 0)")

            with pytest.raises(ArchiverBusy):
                archive()

        assert in_database() == ids

    def test_goes_on_when_prune_was_faster_with_the_partition(self, archive, lake, ids):
        with database.connect("default") as reader, reader.transaction():
            reader.execute("SELECT count(*) FROM outbox_message")
            archive(before=SECOND)
        with database.connect("default") as own:
            partitions.drop_partition(own, FIRST, unless=lambda: False)

        archive(before=SECOND)

        assert state_of(FIRST) == ("deleted", 1, PER_DAY)
        assert Inbox.objects.count() == PER_DAY

    def test_leaves_to_the_next_day_what_a_manifest_of_an_older_version_does_not_speak_of(self, archive, lake, ids):
        with database.connect("default") as reader, reader.transaction():
            reader.execute("SELECT count(*) FROM outbox_message")
            archive(before=SECOND)
        without_frame(lake, "recorded")

        archive(before=SECOND)

        assert state_of(FIRST) == ("deleted", 1, PER_DAY)
        assert books_left()["recorded"] == 2
        archive()
        assert books_left()["recorded"] == 0
        assert len(in_lake(lake, "recorded")) == 2

    def test_does_not_take_a_commit_that_the_database_forgot_for_its_own(self, archive, lake, ids):
        archive(before=SECOND)
        ArchivedDay.objects.all().delete()
        with database.connect("default") as own:
            partitions.create_partition(own, FIRST)
        again = late()

        archive(before=SECOND)

        assert [commit.name for commit in lake.committed()] == ["2001-02-03.a1", "2001-02-03.a2"]
        assert str(again.id) in in_lake(lake)
