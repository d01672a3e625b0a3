"""Histories that are not what they should be: an error that names what and where, never a silent pass."""

from shutil import copytree, ignore_patterns

import psycopg
import pytest
from pyspark.sql import functions as F

from outbox.pipeline.spark import HistoryError
from outbox.pipeline.spark.audit import audit
from outbox.pipeline.spark.cells import MAX_GROUPS
from outbox.pipeline.spark.config import AuditedGroup, PipelineConfig, Source
from outbox.pipeline.spark.history import open_history
from outbox.pipeline.spark.postgres import copy_history
from tests.database_url import url_of
from tests.outbox.pipeline.spark.worlds import World

END_SNAPSHOTS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'outbox audit' AND state = 'idle in transaction'
"""


class Stopped(Exception):
    """The driver was stopped here."""


@pytest.fixture
def config(transactional_db):
    from django.db import connection

    return PipelineConfig(Source(url_of(connection.settings_dict), reader="python"), shuffle_partitions=2)


@pytest.fixture(scope="module")
def made(spark, tmp_path_factory):
    """A folder with a small history."""
    folder = tmp_path_factory.mktemp("made") / "history"
    World().add(8).write(spark, str(folder))
    return folder


class TestACopy:
    def test_whose_snapshot_dies_is_an_error(self, spark, config, tmp_path):
        def log(text):
            if text == "reading inbox":
                with psycopg.connect(config.outbox.url, autocommit=True) as killer:
                    assert killer.execute(END_SNAPSHOTS).fetchall()

        with pytest.raises(HistoryError, match=r"frame 'inbox' cannot be read: .*The snapshot is gone.* Run the job again"):
            copy_history(spark, config, str(tmp_path), log)

    def test_that_is_stopped_at_any_step_leaves_no_history_not_even_an_older_one(self, spark, config, made, tmp_path):
        copytree(made, tmp_path, dirs_exist_ok=True)
        assert open_history(spark, str(tmp_path)).places.count() == 8

        def log(text):
            if text == "reading broker":
                raise Stopped

        with pytest.raises(Stopped):
            copy_history(spark, config, str(tmp_path), log)

        with pytest.raises(HistoryError, match=r"It is written last; the writer may have been stopped"):
            open_history(spark, str(tmp_path))


class TestAHistory:
    def test_of_another_version_names_the_column_that_is_of_another_type(self, spark, made, tmp_path):
        copytree(made, tmp_path, ignore=ignore_patterns("inbox"), dirs_exist_ok=True)
        inbox = spark.read.parquet(str(made / "inbox")).withColumn("lane", F.col("lane").cast("int"))
        inbox.write.parquet(str(tmp_path / "inbox"))

        with pytest.raises(HistoryError, match=r"column 'lane' of 'inbox' in .* is int, not smallint"):
            open_history(spark, str(tmp_path))

    def test_that_lost_a_frame_names_it(self, spark, made, tmp_path):
        copytree(made, tmp_path, ignore=ignore_patterns("inbox"), dirs_exist_ok=True)

        with pytest.raises(HistoryError, match=r"The frame .*/inbox cannot be read"):
            open_history(spark, str(tmp_path))

    def test_that_is_none_is_named(self, spark, tmp_path):
        with pytest.raises(HistoryError, match=r"There is no history in .*the writer may have been stopped"):
            open_history(spark, str(tmp_path))

    def test_of_another_version_names_the_column_that_is_missing(self, spark, made, tmp_path):
        copytree(made, tmp_path, ignore=ignore_patterns("places"), dirs_exist_ok=True)
        spark.read.parquet(str(made / "places")).drop("claimed_at").write.parquet(str(tmp_path / "places"))

        with pytest.raises(HistoryError, match=r"frame 'places' in .* has no column 'claimed_at'"):
            open_history(spark, str(tmp_path))

    def test_is_an_error_where_it_is_empty(self, spark, tmp_path):
        World().write(spark, str(tmp_path))

        with pytest.raises(HistoryError, match=r"is empty: .* Nothing was proved"):
            open_history(spark, str(tmp_path))

    def test_with_two_marks_of_one_lane_was_put_together_of_two(self, spark):
        world = World().add(3)
        world.frames["marks"].append({**world.frames["marks"][0], "last": 9})

        with pytest.raises(HistoryError, match="two marks for one lane"):
            world.audit(spark)

    def test_is_not_audited_for_more_groups_than_fit(self, spark):
        world = World().set(groups=[AuditedGroup(f"group-{n}", ["orders"]) for n in range(MAX_GROUPS + 1)])

        with pytest.raises(HistoryError, match=rf"There are {MAX_GROUPS + 1} consumer groups"):
            audit(spark, world.config, World().history(spark))
