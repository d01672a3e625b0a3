from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection

from outbox import database
from outbox.models import Delayed, Ticket
from outbox.relay import claims
from outbox.relay.claims import MOVE_DUE, move_due
from tests.factories import DelayedFactory, TopicFactory

NOW = datetime.now(UTC)


@pytest.mark.django_db
class TestMoveDue:
    def test_turns_due_rows_into_tickets_in_the_order_of_their_times(self):
        topic = TopicFactory()
        later = DelayedFactory(topic=topic, due_at=NOW - timedelta(seconds=1))
        sooner = DelayedFactory(topic=topic, due_at=NOW - timedelta(seconds=2))

        moved = move_due(database.raw("default"))

        tickets = Ticket.objects.order_by("pos").values_list("message_id", "topic_id")
        assert moved == 2
        assert list(tickets) == [(sooner.message_id, topic.id), (later.message_id, topic.id)]
        assert not Delayed.objects.exists()

    def test_leaves_those_whose_time_has_not_come(self):
        delayed = DelayedFactory(due_at=NOW + timedelta(days=1))

        assert move_due(database.raw("default")) == 0
        assert Delayed.objects.get() == delayed

    def test_moves_no_more_than_the_limit(self, monkeypatch):
        monkeypatch.setattr(claims, "MOVE_LIMIT", 2)
        DelayedFactory.create_batch(3)

        assert move_due(database.raw("default")) == 2
        assert Delayed.objects.count() == 1

    def test_reads_only_due_rows(self):
        DelayedFactory.create_batch(200, topic=TopicFactory(), due_at=NOW + timedelta(days=1))

        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL enable_seqscan = off")
            cursor.execute(f"EXPLAIN (COSTS OFF) {MOVE_DUE}", [10])
            plan = "\n".join(line for (line,) in cursor.fetchall())

        assert "Index Cond: (due_at <= $" in plan, plan


@pytest.mark.django_db(transaction=True)
class TestMoveDueBesideAnother:
    def test_passes_over_rows_that_another_relay_is_moving(self, connect, monkeypatch):
        monkeypatch.setattr(claims, "MOVE_LIMIT", 1)
        DelayedFactory.create_batch(2)
        other = connect()
        with other.transaction():
            assert move_due(other) == 1

            assert move_due(connect()) == 1

        assert Ticket.objects.values("message_id").distinct().count() == 2
