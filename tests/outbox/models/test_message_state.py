from functools import partial

import pytest
from django.db import connection

from outbox.models import Batch, MessageState, State
from tests.factories import BatchFactory, DelayedFactory, MessageRowFactory, TicketFactory, TopicFactory, message_id

pytestmark = pytest.mark.django_db


def state_of(message):
    return MessageState.objects.get(id=getattr(message, "id", message))


class TestMessageState:
    def test_waits_while_there_is_a_ticket(self):
        ticket = TicketFactory()

        assert state_of(ticket.message_id).state == "waiting"

    def test_is_delayed_while_its_time_has_not_come(self):
        delayed = DelayedFactory()

        found = state_of(delayed.message_id)

        assert (found.state, found.due_at) == ("delayed", delayed.due_at)

    @pytest.mark.parametrize(
        ("batch_state", "failures", "expected"),
        [
            (State.RELEASED, 0, "released"),
            (State.RELEASED, 2, "retrying"),
            (State.CLAIMED, 0, "claimed"),
            (State.PREPARED, 0, "prepared"),
            (State.SENT, 0, "sent"),
            (State.DEAD, 1, "dead"),
            (State.DISCARDED, 1, "discarded"),
        ],
    )
    def test_follows_its_batch(self, batch_state, failures, expected):
        batch = BatchFactory(state=batch_state, failures=failures)

        assert state_of(batch.message_ids[0]).state == expected

    def test_is_lost_when_nothing_would_send_it(self):
        message = MessageRowFactory()

        assert state_of(message).state == "lost"

    def test_names_its_place_and_number(self):
        batch = BatchFactory(size=3, lane=2, first_seq=41, state=State.SENT, attempt=5)

        found = state_of(batch.message_ids[1])

        assert (found.batch_id, found.position, found.lane, found.number, found.attempt) == (batch.id, 2, 2, 42, 5)
        assert found.topic == TopicFactory._meta.model.objects.get(id=batch.topic_id).name

    def test_is_that_of_the_later_batch_when_it_was_split_off(self):
        first = BatchFactory(size=3, first_seq=7, state=State.SENT, split=[2])
        BatchFactory(message_ids=[first.message_ids[1]], first_seq=8, state=State.DEAD, failures=1)

        states = [state_of(id_).state for id_ in first.message_ids]

        assert states == ["sent", "dead", "sent"]

    def test_is_found_in_a_batch_whose_last_message_is_older(self):
        older, newer = MessageRowFactory(), MessageRowFactory()
        BatchFactory(message_ids=[newer.id, older.id], state=State.SENT)

        assert (state_of(older).state, state_of(newer).state) == ("sent", "sent")

    def test_does_not_show_tombstones(self):
        tombstone = MessageRowFactory(topic_id=0)

        assert not MessageState.objects.filter(id=tombstone.id).exists()


class TestView:
    def test_reads_few_batches_although_many_hold_the_message(self):
        topic, wanted = TopicFactory(), MessageRowFactory()
        sent = partial(Batch, topic_id=topic.id, state=State.SENT)
        Batch.objects.bulk_create(sent(message_ids=[wanted.id, message_id()], split=[1]) for _ in range(300))
        last = BatchFactory(topic=topic, message_ids=[wanted.id], state=State.CLAIMED)
        Batch.objects.bulk_create(sent(message_ids=[message_id()]) for _ in range(300))

        with connection.cursor() as cursor:
            cursor.execute("ANALYZE outbox_batch")
            cursor.execute(
                "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) SELECT * FROM outbox_message_state WHERE id = %s", [wanted.id]
            )
            plan = "\n".join(line for (line,) in cursor.fetchall())

        assert state_of(wanted).batch_id == last.id
        assert "Index Scan using outbox_batch_newest_message" in plan, plan
        assert "Rows Removed by Filter" not in plan, plan

    def test_looks_for_no_batch_while_there_is_a_ticket(self):
        ticket = TicketFactory()
        BatchFactory.create_batch(3, state=State.SENT)

        with connection.cursor() as cursor:
            cursor.execute(
                "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) SELECT * FROM outbox_message_state WHERE id = %s", [ticket.message_id]
            )
            plan = "\n".join(line for (line,) in cursor.fetchall())

        assert "One-Time Filter" in plan, plan
        assert "outbox_batch_newest_message on outbox_batch o (never executed)" in plan, plan
