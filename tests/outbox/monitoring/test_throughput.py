from datetime import UTC, datetime, timedelta

import pytest

from outbox import database
from outbox.models import Inbox
from outbox.monitoring.status import MINUTES, read_throughput
from tests.factories import MessageRowFactory, message_id

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def flow():
    return lambda: read_throughput(database.raw("default"), now=NOW)


def published(minutes_ago):
    MessageRowFactory(id=message_id(NOW - timedelta(minutes=minutes_ago)))


def handled(minutes_ago, group="cart"):
    one = message_id()
    at = NOW - timedelta(minutes=minutes_ago)
    Inbox.objects.create(consumer_group=group, idempotency_key=str(one), message_id=one, topic="orders", handled_at=at)


class TestReadFlow:
    def test_lays_the_last_hour_out_by_minute(self, flow):
        for minutes in (0.5, 0.6, 59.5, 61):
            published(minutes)
        for minutes in (0.5, 30.5, 61):
            handled(minutes)

        counts = flow()

        assert [len(by_minute) for by_minute in counts] == [MINUTES, MINUTES]
        assert [{n: count for n, count in enumerate(by_minute) if count} for by_minute in counts] == [
            {0: 1, 59: 2},
            {29: 1, 59: 1},
        ]

    def test_counts_ids_of_clocks_that_are_ahead_in_the_last_minute(self, flow):
        published(-5)

        assert flow()[0][-1] == 1

    def test_says_where_it_does_not_know(self, flow, monkeypatch):
        monkeypatch.setattr("outbox.monitoring.status.ROW_LIMIT", 3)
        for minutes in (0.5, 0.6, 10.5, 10.6):
            published(minutes)
        handled(50.5)

        published_by_minute, handled_by_minute = flow()

        assert published_by_minute[-12:] == [None, None, *[0] * 9, 2]
        assert handled_by_minute[9] == 1
