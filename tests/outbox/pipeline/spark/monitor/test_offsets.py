"""Which rows a micro-batch reads: all of them once, whenever they were committed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from django.db import connection

from outbox.models import Duplicate, FailedDelivery, Inbox, State
from outbox.pipeline.spark.monitor import statements
from outbox.pipeline.spark.monitor.offsets import IDLE_AT_FIRST, MEASURE, Offset, advance
from tests.factories import BatchFactory, TopicFactory, message_id
from tests.outbox.pipeline.spark.monitor.conftest import settle

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HANDLE = """
INSERT INTO outbox_inbox (consumer_group, dedupe_key, message_id, source, topic, lane, number)
VALUES ('cart', %s, %s, 'us', 'orders', 1, %s)
"""


def handle(number: int, by: psycopg.Connection) -> None:
    one = message_id()
    by.execute(HANDLE, [str(one), one, number])


class Stream:
    """Reads as Spark has it read: from one offset to the next."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.offset = Offset()

    def read(self, table: str = "inbox") -> list[tuple[object, ...]]:
        with psycopg.connect(self.url, autocommit=True) as reader:
            end = advance(self.offset, *reader.execute(MEASURE).fetchone())
            window = {"low": self.offset.horizon, "high": end.horizon, "oldest": self.offset.oldest}
            self.offset = end
            return sorted(reader.execute(statements.ALL[table], window).fetchall(), key=str)

    def read_all(self, table: str = "inbox") -> list[tuple[object, ...]]:
        """Read when nobody is under way any more."""
        settle(self.url)
        return self.read(table)

    def numbers(self, *, is_quiet: bool = False) -> list[object]:
        return [row[-1] for row in (self.read_all() if is_quiet else self.read())]


@pytest.fixture
def stream(url: str) -> Stream:
    return Stream(url)


class TestAStream:
    def test_reads_a_late_committer_when_it_has_committed_and_nobody_twice(self, stream, url, late):
        handle(1, late)
        with psycopg.connect(url) as quick:
            handle(2, quick)

        before = stream.numbers()
        with psycopg.connect(url) as quick:
            handle(3, quick)
        meanwhile = stream.numbers()
        late.commit()
        after = stream.numbers(is_quiet=True)

        assert (before, meanwhile) == ([], [])  # 2 and 3 have committed, and wait for the one that began before them
        assert after == [1, 2, 3]
        assert stream.numbers(is_quiet=True) == []

    def test_never_sees_what_was_rolled_back(self, stream, late):
        handle(1, late)
        late.rollback()

        assert stream.numbers(is_quiet=True) == []

    def test_reads_what_a_savepoint_wrote(self, stream, late):
        handle(1, late)
        with late.transaction():
            handle(2, late)
        assert stream.numbers() == []

        late.commit()

        assert stream.numbers(is_quiet=True) == [1, 2]

    def test_looks_at_no_row_older_than_what_can_be_new(self, stream, url):
        stream.read_all()
        long_ago = datetime.now(UTC) - IDLE_AT_FIRST - MINUTE
        with psycopg.connect(url) as quick:
            handle(1, quick)
            handle(2, quick)
            quick.execute("UPDATE outbox_inbox SET handled_at = %s WHERE number = 1", [long_ago])

        assert stream.numbers(is_quiet=True) == [2]

    def test_reads_a_batch_again_when_it_has_ended(self, stream, source):
        topic = TopicFactory(name="orders")
        batch = BatchFactory(topic=topic, lane=1, first_seq=5, message_ids=[message_id() for _ in range(3)], split=[2])
        assert stream.read_all("batches") == []

        batch.state = State.SENT
        batch.save()
        BatchFactory(topic=topic, lane=1, first_seq=6, message_ids=[message_id()], state=State.DEAD)

        assert stream.read_all("batches") == [
            ("explained", "", source, "orders", 1, 6),
            ("sent", "", source, "orders", 1, 5),
            ("sent", "", source, "orders", 1, 7),
        ]

    def test_reads_failed_tries_and_dropped_deliveries(self, stream):
        one = message_id()
        of = {"consumer_group": "cart", "topic": "orders", "message_id": one, "nth": 1}
        FailedDelivery.objects.create(**of, source="us", lane=1, number=7, outcome="retry", fingerprint="", error="")
        Duplicate.objects.create(**of)

        assert stream.read_all("failed") == [("retry", "cart", "us", "orders", 1, 7)]
        stream.offset = Offset()
        assert stream.read_all("dropped") == [("dropped", "cart", "", "orders", None, None)]

    def test_counts_on_where_transaction_ids_begin_again(self, url):
        """Rows know 32 bits of their transaction's id; whatever stands above them is that of the next one to be given out."""
        Inbox.objects.create(consumer_group="cart", dedupe_key="1", message_id=message_id(), topic="orders", source="us")
        with connection.cursor() as cursor:
            cursor.execute("SELECT xmin::text::bigint FROM outbox_inbox")
            (own,) = cursor.fetchone()
            for epoch in (0, 1, 7):
                following = f"(SELECT {own + 5 + (epoch << 32)}::bigint AS id) following"
                query = statements.ALL["inbox"].replace(statements.FOLLOWING, following)
                for low, found in (((epoch << 32) + own, 1), ((epoch << 32) + own + 1, 0)):
                    cursor.execute(query, {"low": low, "high": low + 100, "oldest": None})
                    assert len(cursor.fetchall()) == found


class TestAnOffset:
    START = Offset(100, 120, NOON.isoformat(), (NOON - MINUTE).isoformat())

    def test_stays_where_it_is_while_the_oldest_transaction_runs(self):
        assert advance(self.START, 100, 200, NOON + MINUTE) is self.START

    @pytest.mark.parametrize(
        ("horizon", "following", "since"),
        [
            (200, 200, NOON + MINUTE),  # nothing runs: what comes begins later
            (150, 200, NOON),  # what runs began after the last look
            (110, 200, NOON - MINUTE),  # what runs was there at the last look
        ],
    )
    def test_knows_from_when_on_rows_can_be_that_it_has_not_read(self, horizon, following, since):
        found = advance(self.START, horizon, following, NOON + MINUTE)

        assert found == Offset(horizon, following, (NOON + MINUTE).isoformat(), since.isoformat())
        assert found.oldest == since - IDLE_AT_FIRST

    def test_knows_nothing_at_the_beginning(self):
        assert advance(Offset(), 150, 200, NOON).oldest is None
