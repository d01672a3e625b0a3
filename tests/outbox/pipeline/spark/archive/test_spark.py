"""The same by Spark, and database and lake read as one."""

import pytest
from pyspark.sql import functions as F

from outbox import database
from outbox.database import partitions
from outbox.models import MessageRow
from outbox.pipeline.job_config import database_source
from outbox.pipeline.spark import LakeError
from outbox.pipeline.spark.archived import read_all
from outbox.pipeline.spark.archiver import ArchiveConfig
from outbox.pipeline.spark.config import PipelineConfig, Source
from outbox.pipeline.spark.lake import TIMED_FRAMES
from outbox.pipeline.spark.readers import SparkWriter, with_fetch_rows
from tests.outbox.pipeline.spark.archive.arrow import ArrowWriter
from tests.outbox.pipeline.spark.archive.conftest import BEFORE, FIRST, PER_DAY, SECOND
from tests.outbox.pipeline.spark.archive.looks import files_of, flip_a_bit, in_database, in_lake, state_of, without_frame
from tests.outbox.pipeline.spark.tcp import reached_by_tcp


@pytest.fixture
def source(ids, jar):
    found = database_source("default", "jdbc" if jar else "python")
    with reached_by_tcp(found.url) as url:
        yield type(found)(url, reader="jdbc" if jar else "python")


@pytest.fixture
def writer(spark, source, lake):
    return SparkWriter(ArchiveConfig(PipelineConfig(source, shuffle_partitions=2), str(lake.root), BEFORE))


def seen(spark, source, lake):
    """Return the ids of all messages, and of those that were handled, each as often as it is seen."""
    with read_all(spark, source, lake) as frames:
        messages, inbox = (frames[name].select(F.lit(name), "message_id") for name in ("messages", "inbox"))
        rows = messages.unionAll(inbox).collect()
    return [sorted(row[1] for row in rows if row[0] == name) for name in ("messages", "inbox")]


class TestSpark:
    def test_archives_what_can_be_read_as_one_with_the_database_at_every_moment(self, spark, source, writer, archive, lake, ids):
        with database.connect("default") as reader, reader.transaction():  # it is committed, and cannot be deleted
            reader.execute("SELECT count(*) FROM outbox_message")
            assert archive(before=SECOND, writer=writer, rows_per_part=5).kept == {str(FIRST): "open transactions"}
            assert (in_database(), in_lake(lake)) == (ids, ids[:PER_DAY])
            assert seen(spark, source, lake) == [ids, ids]

        archive(before=SECOND, writer=writer)

        assert in_database() == ids[PER_DAY:]
        assert seen(spark, source, lake) == [ids, ids]
        assert state_of(FIRST) == ("deleted", 1, PER_DAY)

    @pytest.mark.usefixtures("backslashes_escape")
    def test_archives_a_database_that_reads_backslashes_as_escapes(self, writer, archive, lake, ids):
        archive(before=SECOND, writer=writer)

        assert state_of(FIRST) == ("deleted", 1, PER_DAY)

    def test_takes_the_name_of_the_lake_literally(self, spark, source, archive, lake, ids):
        lake.root = lake.root.parent / "lake [a-b] {x,y} 100%20 é"

        archive(before=SECOND, writer=SparkWriter(ArchiveConfig(PipelineConfig(source), str(lake.root), BEFORE)))

        assert state_of(FIRST) == ("deleted", 1, PER_DAY)
        assert seen(spark, source, lake) == [ids, ids]

    def test_reads_by_psycopg_as_by_jdbc(self, spark, source, archive, lake, ids):
        by_psycopg = type(source)(source.url, reader="python")
        config = ArchiveConfig(PipelineConfig(by_psycopg, shuffle_partitions=2), str(lake.root), BEFORE)

        archive(before=SECOND, writer=SparkWriter(config), rows_per_part=100)

        assert in_lake(lake) == ids[:PER_DAY]
        assert {name: len(in_lake(lake, name, frame.key[0])) for name, frame in TIMED_FRAMES.items()} == {
            **dict.fromkeys(TIMED_FRAMES, 1),
            "inbox": PER_DAY,
        }

    def test_gives_the_latest_of_a_message_that_was_archived_twice(self, spark, source, archive, lake, ids):
        archive(before=SECOND)
        with database.connect("default") as own:
            own.execute("UPDATE outbox_archived_day SET state = 'changed'")
            partitions.create_partition(own, FIRST)
            own.execute("INSERT INTO outbox_message (id, topic_id, body) VALUES (%s, 0, '')", [ids[3]])

        archive(before=SECOND)

        assert in_lake(lake).count(ids[3]) == 2
        with read_all(spark, source, lake) as frames:
            rows = [(row.message_id, row.state) for row in frames["messages"].collect()]
        assert sorted(one for one, _ in rows) == ids
        assert (ids[3], "tombstone") in rows

    def test_counts_no_row_twice_that_a_later_day_took_along(self, spark, source, archive, lake, ids):
        with database.connect("default") as reader, reader.transaction():
            reader.execute(f"SELECT count(*) FROM {partitions.table_of(FIRST)}")
            assert archive(before=BEFORE).kept == {str(FIRST): "open transactions"}
            assert len(in_lake(lake, "inbox")) == 3 * PER_DAY

        assert seen(spark, source, lake) == [ids, ids]

    def test_reads_days_that_were_archived_by_an_older_version(self, spark, source, archive, lake, ids):
        archive(before=SECOND)
        without_frame(lake, "recorded")

        with read_all(spark, source, lake) as frames:
            assert [row.pos for row in frames["recorded"].collect()] == [SECOND.day]


class TestAFileWithAFlippedBit:
    def test_is_named_when_it_is_read(self, spark, source, archive, lake, ids):
        archive(before=SECOND)
        file = files_of(lake)[0]
        flip_a_bit(file)

        said = f"The file {file} is damaged"
        with pytest.raises(LakeError, match=said), read_all(spark, source, lake) as frames:
            frames["messages"].collect()

    def test_is_named_when_it_is_read_back(self, archive, source, lake, ids):
        class Spoiled(SparkWriter):
            def verify(self, frame, files):
                flip_a_bit(files[0])
                return super().verify(frame, files)

        config = ArchiveConfig(PipelineConfig(source, shuffle_partitions=2), str(lake.root), BEFORE)
        with pytest.raises(LakeError, match=rf"of messages cannot be read back: {lake.root}/messages/.*\.parquet\."):
            archive(before=SECOND, writer=Spoiled(config))

        assert lake.committed() == []


class TestWhatIsFetchedAtOnce:
    @pytest.mark.parametrize(("row_bytes", "rows"), [(0, 10_000), (100, 10_000), (64 * 1024, 256), (100 * 1024**2, 1)])
    def test_fits_in_memory_however_large_a_message_is(self, row_bytes, rows):
        assert with_fetch_rows(Source("postgresql://"), row_bytes).fetch_rows == rows

    def test_follows_from_the_largest_message_of_the_day(self, archive, url, ids):
        seen = []

        class Listening(ArrowWriter):
            def write(self, *arguments):
                seen.append(arguments[-1])
                super().write(*arguments)

        MessageRow.objects.filter(id=ids[0]).update(body=b"x" * 5000)
        archive(before=SECOND, writer=Listening(url))

        assert set(seen) == {5000}
