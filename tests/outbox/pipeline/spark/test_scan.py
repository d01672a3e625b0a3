"""Columns, counts of rows and files as workers read them, held to plain Python and to Spark's own reading."""

import dataclasses
from collections import Counter
from datetime import UTC, datetime
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.pipeline.spark import history as files
from outbox.pipeline.spark import scan
from outbox.pipeline.spark.audit import audit
from outbox.pipeline.spark.history import History, open_history
from outbox.pipeline.spark.keys import digest
from outbox.pipeline.spark.latency import backlog_report, count_times, latency_report
from outbox.pipeline.spark.scan import FEW_CODES, RowCounter, coded, distinct, read_part
from tests.outbox.pipeline.spark.worlds import World, message_id

CODES = st.lists(st.sampled_from([-(1 << 60), -5, 0, 1, 2, 3, FEW_CODES, 1 << 60]), max_size=20)
NEAR_CODES = st.lists(st.integers(-9, 9), max_size=20)


class TestDistinct:
    @settings(deadline=None)
    @given(CODES | NEAR_CODES)
    def test_gives_each_integer_once_and_says_where_it_stands(self, codes):
        keys, rows = distinct(np.array(codes, np.int64))

        assert sorted(keys.tolist()) == sorted(set(codes))
        assert keys[rows].tolist() == codes

    @pytest.mark.parametrize("last", [FEW_CODES - 1, FEW_CODES, FEW_CODES + 1])
    def test_knows_those_at_the_end_of_its_table(self, last):
        keys, rows = distinct(np.array([last, 0, last], np.int64))

        assert keys[rows].tolist() == [last, 0, last]


SCHEMA = pa.schema({"name": pa.string(), "place": pa.string(), "number": pa.int64(), "n": pa.int64()})
TEXT = st.none() | st.sampled_from(["", "a", "b"])
NEAR, FAR = st.integers(-3, 3), st.integers(-(1 << 40), 1 << 40)


def batches_of(numbers):
    return st.lists(st.lists(st.tuples(TEXT, TEXT, numbers), max_size=20), max_size=4)


def count_rows(found, rows):
    batch = pa.RecordBatch.from_pylist([dict(zip(SCHEMA.names, row, strict=False)) for row in rows], SCHEMA)
    found.add([coded(batch, "name"), coded(batch, "place")], [batch.column("number").to_numpy()])


class TestRowCounter:
    @settings(deadline=None)
    @given(batches_of(NEAR) | batches_of(FAR))
    def test_counts_what_has_all_in_common(self, batches):
        found = RowCounter(SCHEMA)
        for rows in batches:
            count_rows(found, rows)

        counted = {tuple(row.values())[:-1]: row["n"] for batch in found.batches() for row in batch.to_pylist()}

        assert counted == Counter(row for rows in batches for row in rows)

    def test_refuses_numbers_that_no_key_can_name(self):
        with pytest.raises(ValueError, match="dim"):
            count_rows(RowCounter(SCHEMA), [("a", "b", np.iinfo(np.int64).min), ("a", "b", np.iinfo(np.int64).max)])


def something_of_everything():
    made = World().add(30).add(9, lane=1).drop("broker", "inbox", number=5).drop("inbox", number=7, consumer_group="cart")
    made.frames["inbox"] += [dict(row) for row in made.frames["inbox"] if row["number"] in (8, 9)]
    made.drop("business", about="shop.order:orders-0-3").drop("messages", number=12)
    for name in ("places", "broker", "inbox"):
        made.change(name, {"number": None, "lane": None}, number=30)
    return made.drop("inbox", number=None, consumer_group="points").change("places", {"at": None, "claimed_at": None}, number=2)


@pytest.fixture(scope="module")
def world():
    return something_of_everything()


@pytest.fixture(scope="module")
def folder(spark, world, tmp_path_factory):
    """The same in Parquet; its name is not as simple as most."""
    found = str(tmp_path_factory.mktemp("history") / "größe 100% +1")
    world.write(spark, found)
    return found


class TestFiles:
    def test_are_audited_as_the_frames_are_that_spark_reads(self, spark, world, folder):
        history = open_history(spark, folder)
        assert set(history.files) == set(history.frames)

        by_workers = audit(spark, world.config, history)
        by_spark = audit(spark, world.config, dataclasses.replace(history, files={}))

        assert len(by_workers.findings) > 7
        assert [one.as_dict() for one in by_workers.findings] == [one.as_dict() for one in by_spark.findings]
        assert by_workers.counts == by_spark.counts

    def test_are_counted_as_the_frames_are_that_spark_reads(self, spark, world, folder):
        history = open_history(spark, folder)
        found = {}
        for name, one in ("workers", history), ("spark", dataclasses.replace(history, files={})):
            times = count_times(spark, world.config, one)
            latencies = latency_report(world.config, times)
            latencies["histograms"].sort()
            found[name] = digest(spark, one), latencies, backlog_report(world.config, one, times)

        assert found["workers"] == found["spark"]
        assert found["spark"][0] != digest(spark, something_of_everything().drop("inbox", number=9).history(spark))

    def test_are_left_to_spark_where_pyarrow_cannot_open_them(self, spark, folder, monkeypatch):
        monkeypatch.setattr(files, "SCHEMES", {"file": "nowhere"})

        assert open_history(spark, folder).files == {}

    def test_are_read_from_an_id_on(self, spark, folder):
        history = open_history(spark, folder).since(message_id("orders", 0, 25))

        found = {name: _rows(spark, history, name) for name in ("places", "broker", "inbox", "business")}

        assert found == {name: history.frames[name].count() for name in found}
        assert found["places"] < found["business"]


class TestReading:
    @pytest.fixture
    def file(self, tmp_path):
        table = pa.table({"number": [*range(1000), None, *range(1001, 2000)], "source": ["a"] * 2000})
        pq.write_table(table, tmp_path / "file.parquet", row_group_size=100)
        return (tmp_path / "file.parquet").as_uri()

    def test_gives_each_row_in_one_part(self, file):
        parts = [read_part({"places": ("number",)}, "", "", frame="places", file=file, part=part) for part in range(scan.PARTS)]

        numbers = [number for part in parts for batch in part for number in batch.column("number").to_pylist()]

        assert numbers == [*range(1000), None, *range(1001, 2000)]

    def test_leaves_out_what_has_no_null_where_it_is_about_those(self, file):
        reading = partial(read_part, {"places": ("source", "number")}, "", "number", frame="places", file=file)

        rows = [len(batch) for part in range(scan.PARTS) for batch in reading(part=part)]

        assert rows == [100]


class TestNulls:
    @pytest.fixture
    def history(self, tmp_path):
        """Return a history of two frames without NULL, and what writes another file of one."""
        found = History({}, frozenset(), datetime.now(UTC), files={"places": [], "broker": []})

        def write(frame, numbers, **options):
            path = tmp_path / f"{frame}-{len(found.files[frame])}.parquet"
            pq.write_table(pa.table({"topic": ["a"] * len(numbers), "number": pa.array(numbers, pa.int64())}), path, **options)
            found.files[frame].append(path.as_uri())
            return path

        write("places", [1, 2, 3])
        write("broker", [])
        return found, write

    def test_are_none_where_the_files_say_so(self, history):
        found, _ = history

        assert not scan.may_have_null(found, ["places", "broker"], "number")

    @pytest.mark.parametrize("options", [{}, {"write_statistics": False}])
    def test_may_be_in_the_last_of_the_files(self, history, options):
        found, write = history
        write("places", [4])
        write("broker", [*range(100), 5 if options else None], row_group_size=50, **options)

        assert scan.may_have_null(found, ["places", "broker"], "number")
        assert not scan.may_have_null(found, ["places"], "number")

    def test_may_be_where_nobody_can_look(self, history):
        found, write = history
        write("places", [4]).write_bytes(b"half a file")

        assert scan.may_have_null(found, ["places"], "number")
        assert scan.may_have_null(found, ["broker", "inbox"], "number")


def _rows(spark, history, name):
    def count(frame, batches):
        yield pa.RecordBatch.from_pydict({"n": [sum(len(batch) for batch in batches)]}, schema=schema)

    schema = pa.schema({"n": pa.int64()})
    column = "subject" if name == "business" else "topic"
    return sum(row.n for row in scan.scan(spark, history, {name: (column,)}, count, schema).collect())
