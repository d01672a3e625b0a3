"""Taking over decided batches, with a connection for each sweep."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from outbox import database
from outbox.batches.take_over import LATE_ENDS, take_over
from outbox.models import Batch, State
from tests.factories import BatchFactory, TopicFactory, stored

pytestmark = pytest.mark.django_db(transaction=True)

WINDOW = timedelta(seconds=2)
MANY = {"batches": 100, "messages": 1000}


def left(over: timedelta = timedelta(minutes=1), **fields) -> Batch:
    """Store a batch whose decider's time, and the settle time after it, has been over for that long."""
    ends_until = datetime.now(UTC) - LATE_ENDS - over
    return BatchFactory(**{"prepared": True, "ends_until": ends_until, "decided_at": ends_until - WINDOW} | fields)


def ids(connection: database.Connection, **limit: int) -> list[int]:
    return [batch.id for batch in take_over(connection, broker="default", window=WINDOW, **MANY | limit)]


class TestTakeOver:
    def test_renews_the_time_in_which_ends_may_leave(self, connect):
        batch = left()
        before = datetime.now(UTC)

        assert ids(connect()) == [batch.id]

        assert before + WINDOW <= stored(batch).ends_until <= datetime.now(UTC) + WINDOW
        assert (stored(batch).state, stored(batch).attempt) == (State.PREPARED, 1)

    def test_gives_a_batch_to_one_sweeper_only(self, connect):
        batch = left()
        first, second = connect(), connect()

        assert [ids(first), ids(second)] == [[batch.id], []]

    def test_passes_over_what_another_is_taking_over_now(self, connect):
        old, young = left(), left()
        first, second = connect(), connect()

        with first.transaction():
            assert ids(first, batches=1) == [old.id]
            assert ids(second) == [young.id]

    def test_gives_none_twice_to_sweepers_that_run_at_once(self, connect):
        batches = [left() for _ in range(60)]
        connections = [connect() for _ in range(4)]
        together = threading.Barrier(len(connections))

        def sweep(connection: database.Connection) -> list[int]:
            together.wait(10)
            found = []
            while some := ids(connection, batches=3):
                found += some
            return found

        with ThreadPoolExecutor(len(connections)) as pool:
            taken = [batch for found in pool.map(sweep, connections) for batch in found]

        assert sorted(taken) == [batch.id for batch in batches]

    @pytest.mark.parametrize(
        "fields",
        [
            {"over": timedelta(seconds=-5)},
            {"over": timedelta(seconds=-5), "ends_until": None},
            {"state": State.SENT},
            {"state": State.RELEASED},
            {"topic": None},
        ],
        ids=["not settled", "not settled without an end", "sent", "released", "another broker's"],
    )
    def test_leaves_what_is_not_its_own(self, connect, fields):
        if "topic" in fields:
            fields = {"topic": TopicFactory(broker="another")}
        left(**fields)

        assert ids(connect()) == []

    def test_counts_from_the_decision_where_no_end_is_written(self, connect):
        batch = left(ends_until=None)

        assert ids(connect()) == [batch.id]

    def test_begins_with_the_oldest_and_ends_with_so_many_messages(self, connect):
        batches = [left(size=size) for size in (4, 3, 1)]
        connection = connect()

        assert ids(connection, messages=5) == [batch.id for batch in batches[:2]]
        assert ids(connection, messages=5) == [batches[2].id]

    def test_takes_one_that_is_larger_than_that(self, connect):
        batch = left(size=7)

        assert ids(connect(), messages=5) == [batch.id]

    def test_tells_all_that_finds_the_half_messages_again(self, connect):
        row = left(size=3, half_places=[None, "a:2", "a:3"], open=[2, 3], split=[3], half_ids=["h1", "h2", None])
        connection = connect()
        (source,) = connection.execute("SELECT id FROM outbox_source").fetchone()

        [batch] = take_over(connection, broker="default", window=WINDOW, **MANY)

        half = batch.half(2)
        assert batch.positions == [2]
        assert (half.half_id, half.message_id, half.place) == ("h2", str(row.message_ids[1]), "a:2")
        assert (half.source, half.decided_at) == (source, row.decided_at)
