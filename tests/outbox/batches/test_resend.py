"""Resends; with two connections where two operators act at once."""

from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction

from outbox import database
from outbox.batches.operators import GONE, SENT_SINCE, resend
from outbox.database.locks import Lock
from outbox.models import Batch, MessageState, State, Ticket
from tests.factories import BatchFactory, MessageRowFactory, TicketFactory, TopicFactory, message_id

pytestmark = pytest.mark.django_db

LONG_AGO = datetime.now(UTC) - timedelta(hours=2)
NOW = datetime.now(UTC) + timedelta(hours=1)


def sent(size=1, **fields):
    return BatchFactory(size=size, state=State.SENT, sent_at=LONG_AGO, **fields)


def again(*ids, lost_before=NOW):
    with transaction.atomic():
        return resend(database.raw("default"), ids, lost_before=lost_before)


def state(message):
    return MessageState.objects.get(id=message).state


class TestSendAgain:
    def test_takes_a_message_out_of_its_batch_under_its_old_number(self):
        batch = sent(size=3, first_seq=7, attempt=2)
        first, lost, last = batch.message_ids

        settled = again(lost)

        assert settled.messages == 1
        one = Batch.objects.exclude(id=batch.id).get()
        assert (one.message_ids, one.lane, one.first_seq, one.state, one.attempt) == ([lost], 1, 8, State.RELEASED, 2)
        assert [state(first), state(lost), state(last)] == ["sent", "released", "sent"]

    def test_returns_a_batch_of_one_itself(self):
        batch = sent(half_ids=["half-1"], half_places=["a:1"], ends_until=datetime.now(UTC), lane=None, first_seq=None)

        again(*batch.message_ids)

        batch.refresh_from_db()
        assert (batch.state, batch.half_ids, Batch.objects.count()) == (State.RELEASED, None, 1)
        assert (batch.half_places, batch.ends_until) == (None, None)

    def test_can_take_all_messages_of_a_batch(self):
        batch = sent(size=2)

        assert again(*batch.message_ids).messages == 2

        assert [state(one) for one in batch.message_ids] == ["released", "released"]

    def test_takes_an_order_key_along(self):
        batch = sent(size=2, topic=TopicFactory(type="fifo"), order_keys=[11, 22])

        again(batch.message_ids[1])

        assert Batch.objects.exclude(id=batch.id).get().order_keys == [22]

    @pytest.mark.parametrize("origin", [None, 7])
    def test_keeps_the_place_of_a_message_in_the_order_of_its_key(self, origin):
        batch = sent(size=2, topic=TopicFactory(type="fifo"), order_keys=[11, 11], origin_id=origin)

        again(batch.message_ids[1])

        assert Batch.objects.exclude(id=batch.id).get().origin_id == (origin or batch.id)

    def test_gives_a_ticket_to_what_nothing_would_ever_send(self):
        row = MessageRowFactory(topic=TopicFactory(type="fifo"), key="customer-1")
        assert state(row.id) == "lost"

        again(row.id)

        assert state(row.id) == "waiting"
        assert Ticket.objects.get().order_key is not None

    def test_leaves_alone_what_was_sent_since_it_was_seen_to_be_lost(self):
        batch = sent()

        settled = again(*batch.message_ids, lost_before=LONG_AGO - timedelta(seconds=1))

        assert settled.refused == {str(batch.message_ids[0]): SENT_SINCE}
        assert state(batch.message_ids[0]) == "sent"

    def test_refuses_messages_that_are_on_their_way_or_dead(self):
        waiting = TicketFactory().message_id
        dead = BatchFactory(state=State.DEAD).message_ids[0]
        nobody = message_id()

        settled = again(waiting, dead, nobody)

        assert settled.messages == 0
        assert settled.refused == {
            str(waiting): "It is on its way: waiting.",
            str(dead): "It is dead: replay it with the other dead messages.",
            str(nobody): GONE,
        }


@pytest.mark.django_db(transaction=True)
class TestTwoPeople:
    def test_send_it_once(self):
        batch = sent(size=2)
        lost = batch.message_ids[0]
        with database.connect("default") as first, database.connect("default") as second:
            with first.transaction():
                assert resend(first, [lost], lost_before=NOW).messages == 1
                assert second.execute(f"SELECT pg_try_advisory_lock({Lock.RESEND}, 0)").fetchone() == (False,)
            with second.transaction():
                settled = resend(second, [lost], lost_before=NOW)

        assert settled.refused == {str(lost): "It is on its way: released."}
        assert Batch.objects.count() == 2
