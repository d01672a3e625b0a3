"""Claims of ordered topics: one batch of a key at a time."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from outbox.batches.claim import LOCK_ORDER
from outbox.models import Batch, State, Ticket, Topic
from outbox.relay import claims as claims_module
from tests.factories import BatchFactory, TicketFactory, TopicFactory
from tests.outbox.relay.claiming import claims, ids
from tests.waiting import wait_until_it_blocks


@pytest.mark.django_db
class TestClaimOrdered:
    def test_notes_the_order_keys(self):
        topic = TopicFactory(type="fifo")
        tickets = [TicketFactory(topic=topic, order_key=key) for key in (5, -6, 5)]

        (batch,) = claims().claim_ordered()

        assert batch.message_ids == ids(tickets)
        assert batch.order_keys == [5, -6, 5]

    @pytest.mark.parametrize("state", [State.RELEASED, State.CLAIMED, State.DEAD])
    def test_leaves_keys_that_have_a_message_in_an_unfinished_or_dead_batch(self, state):
        topic = TopicFactory(type="fifo")
        BatchFactory(topic=topic, order_keys=[1], state=state)
        TicketFactory(topic=topic, order_key=1)
        free = TicketFactory(topic=topic, order_key=2)

        (batch,) = claims().claim_ordered()

        assert batch.message_ids == ids([free])

    @pytest.mark.parametrize("state", [State.SENT, State.DISCARDED])
    def test_takes_keys_whose_batches_are_finished(self, state):
        topic = TopicFactory(type="fifo")
        BatchFactory(topic=topic, order_keys=[1], state=state)
        TicketFactory(topic=topic, order_key=1)

        assert len(claims().claim_ordered()) == 1

    def test_is_not_stopped_by_batches_without_order(self):
        """Their order_keys are NULL, and NOT IN is never true for a list with a NULL."""
        BatchFactory()
        TicketFactory(topic=TopicFactory(type="fifo"), order_key=1)

        assert len(claims().claim_ordered()) == 1

    def test_takes_a_key_that_was_freed_in_the_order_of_its_tickets(self):
        """A claim that started at the last position seen would take the later ticket first."""
        topic = TopicFactory(type="fifo")
        dead = BatchFactory(topic=topic, order_keys=[1], state=State.DEAD)
        mine = claims()
        waiting = TicketFactory(topic=topic, order_key=1)
        TicketFactory(topic=topic, order_key=2)
        mine.claim_ordered()

        Batch.objects.filter(pk=dead.pk).update(state=State.DISCARDED)
        later = TicketFactory(topic=topic, order_key=1)
        (batch,) = mine.claim_ordered()

        assert batch.message_ids == ids([waiting, later])

    def test_passes_over_topics_whose_keys_are_all_held(self, monkeypatch):
        monkeypatch.setattr(claims_module, "TOPICS_PER_CLAIM", 2)
        for topic in TopicFactory.create_batch(4, type="fifo"):
            BatchFactory(topic=topic, order_keys=[1], state=State.DEAD)
            TicketFactory(topic=topic, order_key=1)
        free = TicketFactory(topic=TopicFactory(type="fifo"), order_key=2)
        mine = claims()

        (batch,) = mine.claim_ordered()

        assert batch.message_ids == ids([free])
        assert mine.claim_ordered() == []  # and ends, though nothing can be claimed

    def test_takes_a_ticket_from_before_its_topic_was_ordered(self):
        topic = TopicFactory(type="fifo")
        BatchFactory(topic=topic, order_keys=[1], state=State.DEAD)
        TicketFactory(topic=topic, order_key=None)

        (batch,) = claims().claim_ordered()

        assert batch.order_keys == [None]


@pytest.mark.django_db
class TestManyBlockedTopics:
    """Topics whose waiting keys are all held: as many as one scan reads, one more, or one more than two scans read."""

    @pytest.fixture(params=[16, 17, 33])
    def topics(self, request) -> list[Topic]:
        topics = sorted(TopicFactory.create_batch(request.param, type="fifo"), key=lambda topic: topic.id)
        for topic in topics:
            BatchFactory(topic=topic, order_keys=[1], state=State.DEAD)
            TicketFactory(topic=topic, order_key=1)
        return topics

    @pytest.mark.timeout(20)
    def test_end_the_look(self, topics):
        assert claims().claim_ordered() == []

    @pytest.mark.timeout(20)
    @pytest.mark.parametrize("turns", [0, 1])
    def test_end_the_look_though_the_topic_at_which_it_began_is_gone(self, topics, turns):
        mine = claims()
        for _ in range(turns):
            mine.claim_ordered()
        first = next((one for one in topics if one.id > mine.ordered_after), topics[0])

        Ticket.objects.filter(topic_id=first.id).delete()

        assert mine.claim_ordered() == []

    @pytest.mark.timeout(20)
    def test_end_the_look_while_topics_leave_and_come_back(self, topics, monkeypatch):
        real, looks = claims_module.claim_ordered, []

        def leave_and_look(*args, **scope):
            looks.append(scope["after"])
            Ticket.objects.filter(topic_id=topics[len(looks) % len(topics)].id).delete()
            return real(*args, **scope)

        monkeypatch.setattr(claims_module, "claim_ordered", leave_and_look)

        assert claims().claim_ordered() == []
        assert len(looks) <= 4

    def test_do_not_hide_a_topic_whose_key_is_free(self, topics):
        free = TicketFactory(topic=TopicFactory(type="fifo"), order_key=2)
        mine = claims()

        assert [batch.message_ids for batch in mine.claim_ordered()] == [ids([free])]


@pytest.mark.django_db(transaction=True)
class TestTicketThatSomebodyElseHasLocked:
    """For example by an operator's SELECT ... FOR UPDATE."""

    LOCK = "SELECT 1 FROM outbox_ticket WHERE message_id = %s FOR UPDATE"

    def test_keeps_the_order_of_its_key(self, connect):
        topic = TopicFactory(type="fifo")
        first, later, other = (TicketFactory(topic=topic, order_key=key) for key in (1, 1, 2))
        operator, mine = connect(), claims(connect())

        with operator.transaction():
            operator.execute(self.LOCK, [first.message_id])
            (meanwhile,) = mine.claim_ordered()
        (afterwards,) = mine.claim_ordered()

        assert meanwhile.message_ids == ids([other])
        assert afterwards.message_ids == ids([first, later])

    def test_holds_back_only_what_is_behind_it(self, connect):
        topic = TopicFactory(type="fifo")
        before, locked, _ = (TicketFactory(topic=topic, order_key=1) for _ in range(3))
        operator, mine = connect(), claims(connect())

        with operator.transaction():
            operator.execute(self.LOCK, [locked.message_id])
            (batch,) = mine.claim_ordered()

        assert batch.message_ids == ids([before])


@pytest.mark.django_db(transaction=True)
class TestTwoOrderedClaims:
    def test_never_hold_one_key_at_the_same_time(self, connect):
        """The lock is a statement of its own: taken within the claim, its snapshot would be older than the wait."""
        topic = TopicFactory(type="fifo")
        TicketFactory.create_batch(2, topic=topic, order_key=1)
        first, second = connect(), connect()

        with ThreadPoolExecutor(1) as pool:
            with first.transaction():
                first.execute(LOCK_ORDER)
                (mine,) = claims(first, 1).claim_ordered(limit=1)
                theirs = pool.submit(claims(second, 2).claim_ordered)
                wait_until_it_blocks(first)

            assert len(mine.message_ids) == 1
            assert theirs.result(10) == []
