"""Claims of the few new messages of a topic, which load the messages, too."""

import pytest

from outbox import database
from outbox.batches.claim import FEW, SMALL
from outbox.models import Batch, Lane, MessageRow, State, Ticket, Topic
from outbox.relay.breaker import Budget
from outbox.relay.send import slices
from tests.factories import MessageRowFactory, TicketFactory, TopicFactory, stored
from tests.outbox.relay.claiming import claims, ids, late_ticket

SLICE_BYTES = 1 << 20


def bodies(batch: object, slice_bytes: int = SLICE_BYTES) -> list[list[bytes | None]]:
    """Return the bodies of a batch, slice by slice, as they are sent."""
    loaded = slices(database.raw("default"), [batch], Budget(slice_bytes))  # type: ignore[list-item]
    return [[body for _, rows in part for *_, body in rows] for part in loaded]


@pytest.fixture
def topic() -> Topic:
    return TopicFactory()


@pytest.mark.django_db
class TestClaimNew:
    def test_turns_the_oldest_tickets_of_the_topic_into_a_batch(self, topic):
        TicketFactory()
        tickets = TicketFactory.create_batch(2, topic=topic)

        (batch,) = claims(lane=7).claim_new([topic.id])

        row = stored(batch)
        assert (batch.topic, batch.message_ids, batch.first_seq) == (topic.name, ids(tickets), 1)
        assert (row.state, row.owner, row.lane, row.attempt) == (State.CLAIMED, 7, 7, batch.attempt)
        assert Lane.objects.get(topic_id=topic.id, lane=7).last_seq == 2
        assert Ticket.objects.count() == 1

    def test_numbers_go_on_where_other_claims_ended(self, topic):
        mine = claims()
        TicketFactory.create_batch(3, topic=topic)
        mine.claim()
        TicketFactory.create_batch(2, topic=topic)

        (batch,) = mine.claim_new([topic.id])

        assert batch.first_seq == 4

    def test_brings_along_what_the_messages_say(self, topic):
        TicketFactory(topic=topic, message=MessageRowFactory(topic=topic, body=b"\0one", key="k", about="shop.order:1"))

        (batch,) = claims().claim_new([topic.id])

        assert [row[:1] + row[2:] for row in batch.messages] == [("k", "shop.order:1", b"\0one")]
        assert bodies(batch) == [[b"\0one"]]

    def test_leaves_large_messages_to_be_loaded_in_slices(self, topic):
        large = b"x" * (SMALL + 1)
        for body in (b"small", large):
            TicketFactory(topic=topic, message=MessageRowFactory(topic=topic, body=body))

        (batch,) = claims().claim_new([topic.id])

        assert batch.messages is None
        assert bodies(batch, slice_bytes=SMALL) == [[b"small"], [large]]

    def test_keeps_to_the_size_of_a_slice(self, topic):
        for body in (b"one", b"two"):
            TicketFactory(topic=topic, message=MessageRowFactory(topic=topic, body=body))

        (batch,) = claims().claim_new([topic.id])

        assert bodies(batch, slice_bytes=4) == [[b"one"], [b"two"]]

    def test_knows_a_message_whose_row_is_gone(self, topic):
        gone, there = TicketFactory.create_batch(2, topic=topic)
        MessageRow.objects.filter(id=gone.message_id).delete()

        (batch,) = claims().claim_new([topic.id])

        assert batch.message_ids == ids([gone, there])
        assert [body is None for body in bodies(batch)[0]] == [True, False]

    def test_takes_few_at_once(self, topic):
        TicketFactory.create_batch(FEW + 1, topic=topic)
        mine = claims()

        (first,), (second,) = mine.claim_new([topic.id]), mine.claim_new([topic.id])

        assert [len(first.message_ids), len(second.message_ids)] == [FEW, 1]

    @pytest.mark.parametrize("fields", [{"paused": True}, {"broker": "other"}], ids=str)
    def test_leaves_topics_alone_that_are_paused_or_of_another_broker(self, fields):
        topic = TopicFactory(**fields)
        TicketFactory(topic=topic)

        assert claims().claim_new([topic.id]) == []

        assert (Ticket.objects.count(), Batch.objects.count()) == (1, 0)

    def test_leaves_topics_alone_that_get_no_answer(self, topic):
        TicketFactory(topic=topic)

        assert claims().claim_new([topic.id], without=[topic.name]) == []

    def test_finds_nothing_of_a_topic_that_is_gone(self):
        assert claims().claim_new([2_000_000]) == []

    def test_claims_ordered_topics_by_their_keys(self):
        topic = TopicFactory(ordered=True)
        _, _, other = (TicketFactory(topic=topic, order_key=key) for key in (1, 1, 2))
        mine = claims(batch_size=1)
        mine.claim_new([topic.id])

        (batch,) = mine.claim_new([topic.id])

        assert batch.message_ids == ids([other])
        assert batch.order_keys == [2]


@pytest.mark.django_db(transaction=True)
class TestTwoRelays:
    def test_claim_each_message_once(self, connect):
        topic = TopicFactory()
        tickets = TicketFactory.create_batch(3, topic=topic)
        first, second = connect(), connect()
        with first.transaction():
            (one,) = claims(first, 1).claim_new([topic.id])
            meanwhile = claims(second, 2).claim_new([topic.id])  # does not wait for the first one's commit

        assert one.message_ids == ids(tickets)
        assert meanwhile == []

    def test_find_a_message_that_was_committed_late(self, connect):
        topic = TopicFactory()
        mine = claims(connect(), 1)
        with late_ticket(connect(), topic) as message:
            TicketFactory(topic=topic)
            mine.claim_new([topic.id])

        (batch,) = mine.claim_new([topic.id])

        assert batch.message_ids == [str(message.id)]

    def test_leave_a_message_that_was_committed_late_to_the_next_full_scan_while_scans_are_expensive(self, connect, clock):
        topic = TopicFactory()
        mine = claims(connect(), 1, clock=clock)
        mine.late_scans.due_at = clock.now + 1
        with late_ticket(connect(), topic) as message:
            TicketFactory(topic=topic)
            mine.claim_new([topic.id])

        assert mine.claim_new([topic.id]) == []
        assert [batch.message_ids for batch in mine.claim()] == [[str(message.id)]]
