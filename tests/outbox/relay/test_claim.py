"""Claims: on Django's connection where one relay tells it, with two real connections where it takes two."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection as django_connection

from outbox import database
from outbox.models import Batch, Lane, State, Ticket
from outbox.relay import claim as claim_module
from outbox.relay import lane as lanes
from outbox.relay.claim import CLAIM, CLAIM_ORDERED, LOCK_ORDER, Claims, Floors
from tests.factories import BatchFactory, MessageRowFactory, TicketFactory, TopicFactory, stored
from tests.waiting import wait_until, wait_until_it_blocks

LEASE = timedelta(seconds=30)


def claims(connection: database.Connection | None = None, lane: int = 1, **options) -> Claims:
    return Claims(
        connection or database.raw("default"), "default", lanes.Lane(lane), LEASE, options.pop("batch_size", 500), **options
    )


def ids(tickets: list[Ticket]) -> list[str]:
    return [str(ticket.message_id) for ticket in tickets]


def tickets_read(plan: dict[str, Any]) -> int:
    own = plan["Actual Rows"] * plan["Actual Loops"] if plan.get("Relation Name") == "outbox_ticket" else 0
    return own + sum(tickets_read(part) for part in plan.get("Plans", []))


@pytest.mark.django_db
class TestClaim:
    def test_turns_the_oldest_tickets_of_a_topic_into_a_batch(self):
        topic = TopicFactory(type="transaction")
        tickets = TicketFactory.create_batch(3, topic=topic)

        (batch,) = claims(batch_size=2).claim()

        assert (batch.topic, batch.type, batch.attempt) == (topic.name, "transaction", 1)
        assert batch.message_ids == ids(tickets[:2])
        assert [ticket.message_id for ticket in Ticket.objects.all()] == [tickets[2].message_id]

    def test_writes_owner_and_lease(self):
        TicketFactory()

        (batch,) = claims(lane=7).claim()

        row = stored(batch)
        assert (row.state, row.owner, row.lane) == (State.CLAIMED, 7, 7)
        assert timedelta(seconds=28) < row.lease_until - datetime.now(UTC) <= LEASE

    def test_takes_at_least_one_message_of_each_of_many_topics(self):
        topics = TopicFactory.create_batch(4)
        for topic in topics:
            TicketFactory.create_batch(2, topic=topic)
        frugal = claims(batch_size=1)

        batches = [*frugal.claim(), *frugal.claim()]

        assert len(batches) == 8

    def test_makes_a_batch_for_each_topic(self):
        tickets = TicketFactory.create_batch(3)

        batches = claims().claim()

        assert [batch.message_ids for batch in batches] == [ids([ticket]) for ticket in tickets]

    def test_numbers_messages_without_gap(self):
        topic = TopicFactory()
        mine = claims(batch_size=2)
        TicketFactory.create_batch(3, topic=topic)

        found = [*mine.claim(), *mine.claim()]

        assert [(batch.first_seq, len(batch.message_ids)) for batch in found] == [(1, 2), (3, 1)]
        assert Lane.objects.get(topic_id=topic.id).last_seq == 3

    def test_shares_its_messages_between_the_topics_served_last(self):
        first, second = TopicFactory.create_batch(2)
        others = TopicFactory.create_batch(2)
        for topic in (first, second, *others):
            TicketFactory.create_batch(3, topic=topic)
        mine = claims(batch_size=4)

        mine.claim()
        TicketFactory.create_batch(5, topic=first)
        batches = mine.claim()

        assert [len(batch.message_ids) for batch in batches] == [2]

    def test_goes_round_the_topics(self, monkeypatch):
        monkeypatch.setattr(claim_module, "TOPICS_PER_CLAIM", 2)
        topics = TopicFactory.create_batch(3)
        for topic in topics:
            TicketFactory.create_batch(4, topic=topic)
        mine = claims(batch_size=1)

        served = [[batch.topic for batch in mine.claim()] for _ in range(3)]

        a, b, c = (topic.name for topic in topics)
        assert served == [[a, b], [c, a], [b, c]]

    @pytest.mark.parametrize("fields", [{"paused": True}, {"broker": "another"}, {"type": "fifo"}])
    def test_leaves_topics_that_are_not_its_business(self, fields):
        TicketFactory(topic=TopicFactory(**fields), order_key=1)

        assert claims().claim() == []

    def test_takes_one_topic_only_when_told_a_limit(self):
        for topic in TopicFactory.create_batch(2):
            TicketFactory.create_batch(2, topic=topic)

        batches = claims().claim(limit=1)

        assert [len(batch.message_ids) for batch in batches] == [1]

    def test_reads_no_more_tickets_than_it_takes_however_many_wait(self):
        topics = TopicFactory.create_batch(50)
        with django_connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO outbox_ticket (message_id, topic_id) SELECT gen_random_uuid(), %s FROM generate_series(1, 20000)",
                [topics[0].id],
            )
            cursor.execute("ANALYZE outbox_ticket")
            arguments = claims(batch_size=1)._arguments({}, 1, ordered=False)
            cursor.execute("EXPLAIN (ANALYZE, FORMAT JSON) " + CLAIM, arguments)
            plan = cursor.fetchone()[0][0]["Plan"]

        assert 0 < tickets_read(plan) <= 10


@pytest.mark.django_db(transaction=True)
class TestTwoRelays:
    def test_never_claim_the_same_ticket(self, connect):
        topic = TopicFactory()
        tickets = TicketFactory.create_batch(4, topic=topic)
        first, second = connect(), connect()

        with first.transaction():
            (one,) = claims(first, 1, batch_size=2).claim()
            (two,) = claims(second, 2, batch_size=2).claim()  # does not wait for the first one's commit

        assert one.message_ids == ids(tickets[:2])
        assert two.message_ids == ids(tickets[2:])

    def test_number_gap_free_when_a_claim_is_rolled_back(self, connect):
        topic = TopicFactory()
        TicketFactory.create_batch(2, topic=topic)
        first, second = connect(), connect()

        with first.transaction(force_rollback=True):
            claims(first, 1).claim()
        (batch,) = claims(second, 1).claim()

        assert (batch.first_seq, len(batch.message_ids)) == (1, 2)
        assert Lane.objects.get(topic_id=topic.id, lane=1).last_seq == 2

    def test_number_gap_free_per_lane_side_by_side(self, connect):
        topics = TopicFactory.create_batch(3)
        for topic in topics:
            TicketFactory.create_batch(60, topic=topic, message=MessageRowFactory(topic=topic))

        def drain(lane: int) -> None:
            mine = claims(connect(), lane, batch_size=7)
            while mine.claim():
                pass

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(drain, [1, 2, 3]))

        assert not Ticket.objects.exists()
        for topic in topics:
            rows = list(Batch.objects.filter(topic_id=topic.id).order_by("lane", "first_seq"))
            assert sum(len(row.message_ids) for row in rows) == 60
            for lane in {row.lane for row in rows}:
                numbers = [row.first_seq + n for row in rows if row.lane == lane for n in range(len(row.message_ids))]
                assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.django_db
class TestFloors:
    def test_start_a_claim_at_the_last_position_seen(self, clock):
        mine = claims(floors=Floors(clock))
        late, *tickets = TicketFactory.create_batch(3, topic=TopicFactory())
        Ticket.objects.filter(pos=late.pos).delete()
        mine.claim()
        mine.floors.from_zero_at = clock.now + 1  # a look from 0 has just been expensive

        self.commit_late(late)

        assert mine.claim() == []
        assert mine.floors.positions == {tickets[-1].topic_id: tickets[-1].pos}

    def test_find_a_ticket_that_was_committed_late_within_a_second(self, clock):
        mine = claims(floors=Floors(clock))
        late, *_ = TicketFactory.create_batch(3, topic=TopicFactory())
        Ticket.objects.filter(pos=late.pos).delete()
        mine.claim()
        mine.floors.from_zero_at = clock.now + 1
        self.commit_late(late)

        clock.now += 1

        assert [batch.message_ids for batch in mine.claim()] == [ids([late])]

    def test_look_from_zero_once_a_second_at_least(self, clock):
        floors = Floors(clock)
        began = clock.now

        clock.now += 60  # it took a minute
        floors.note_from_zero(began)

        assert not floors.is_due()
        clock.now += 1
        assert floors.is_due()

    def test_spend_a_twentieth_of_the_time_on_it_at_most(self, clock):
        floors = Floors(clock)
        began = clock.now

        clock.now += 0.01
        floors.note_from_zero(began)

        clock.now += 0.18
        assert not floors.is_due()
        clock.now += 0.03
        assert floors.is_due()

    @staticmethod
    def commit_late(ticket: Ticket) -> None:
        with django_connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO outbox_ticket (pos, message_id, topic_id) OVERRIDING SYSTEM VALUE VALUES (%s, %s, %s)",
                [ticket.pos, ticket.message_id, ticket.topic_id],
            )


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

    @pytest.mark.parametrize("state", [State.SENT, State.SKIPPED])
    def test_takes_keys_whose_batches_are_finished(self, state):
        topic = TopicFactory(type="fifo")
        BatchFactory(topic=topic, order_keys=[1], state=state)
        TicketFactory(topic=topic, order_key=1)

        assert len(claims().claim_ordered()) == 1

    def test_is_not_stopped_by_batches_without_order(self):
        """Their order_keys are NULL, and one NULL in a NOT IN claims nothing for ever."""
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

        Batch.objects.filter(pk=dead.pk).update(state=State.SKIPPED)
        later = TicketFactory(topic=topic, order_key=1)
        (batch,) = mine.claim_ordered()

        assert batch.message_ids == ids([waiting, later])

    def test_passes_over_topics_whose_keys_are_all_held(self, monkeypatch):
        monkeypatch.setattr(claim_module, "TOPICS_PER_CLAIM", 2)
        for topic in TopicFactory.create_batch(4, type="fifo"):
            BatchFactory(topic=topic, order_keys=[1], state=State.DEAD)
            TicketFactory(topic=topic, order_key=1)
        free = TicketFactory(topic=TopicFactory(type="fifo"), order_key=2)
        mine = claims()

        (batch,) = mine.claim_ordered()

        assert batch.message_ids == ids([free])
        assert mine.claim_ordered() == []  # and ends, though nothing can be claimed


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
                (mine,) = first.execute(CLAIM_ORDERED, claims(first, 1)._arguments({}, 1, ordered=True)).fetchall()
                theirs = pool.submit(claims(second, 2).claim_ordered)
                wait_until_it_blocks(first)

            assert mine[2] is not None
            assert theirs.result(10) == []


@pytest.mark.django_db(transaction=True)
class TestReclaim:
    @pytest.fixture
    def held(self, connect: Callable[[], database.Connection]) -> int:
        """A lane that another relay holds."""
        return lanes.take_lane(connect(), lanes=16).number

    def test_takes_up_a_batch_that_is_due_with_the_next_attempt(self, connect):
        batch = BatchFactory(state=State.RELEASED, size=2, attempt=4, tries=3, split=[1], lane=9, first_seq=50)

        found = claims(connect(), 2).reclaim()

        assert (found.id, found.attempt, found.tries, found.split) == (batch.id, 5, 3, {1})
        assert (found.lane, found.first_seq) == (9, 50)  # its numbers stay
        assert (stored(batch).state, stored(batch).owner, stored(batch).due_at) == (State.CLAIMED, 2, None)

    def test_takes_the_oldest_first(self, connect):
        old, new = BatchFactory.create_batch(2, state=State.RELEASED)
        connection = connect()
        mine = claims(connection, lanes.take_lane(connection, lanes=16).number)

        found = [mine.reclaim().id, mine.reclaim().id]

        assert found == [old.id, new.id]
        assert mine.reclaim() is None

    def test_leaves_a_batch_that_is_not_due_yet(self, connect):
        BatchFactory(state=State.RELEASED, due_at=datetime.now(UTC) + timedelta(minutes=1))

        assert claims(connect()).reclaim() is None

    def test_leaves_a_batch_whose_lease_and_owner_live(self, connect, held):
        BatchFactory(owner=held)

        assert claims(connect(), 2).reclaim() is None

    def test_takes_a_batch_whose_lease_is_over(self, connect, held):
        batch = BatchFactory(owner=held, lease_until=datetime.now(UTC) - timedelta(seconds=1))

        assert claims(connect(), 2).reclaim().id == batch.id

    def test_takes_a_batch_at_once_whose_relay_died(self, connect):
        dying = connect()
        batch = BatchFactory(owner=lanes.take_lane(dying, lanes=16).number)
        mine = claims(connect(), 2)
        assert mine.reclaim() is None

        dying.close()

        found = wait_until(mine.reclaim)  # the server may take a moment to see it
        assert (found.id, found.attempt) == (batch.id, 2)

    @pytest.mark.parametrize("state", [State.PREPARED, State.SENT, State.DEAD, State.SKIPPED])
    def test_leaves_batches_that_are_settled(self, connect, state):
        BatchFactory(state=state, lease_until=datetime.now(UTC) - timedelta(hours=1), due_at=datetime.now(UTC))

        assert claims(connect()).reclaim() is None

    @pytest.mark.parametrize("fields", [{"paused": True}, {"broker": "another"}])
    def test_leaves_topics_that_are_not_its_business(self, connect, fields):
        BatchFactory(state=State.RELEASED, topic=TopicFactory(**fields))

        assert claims(connect()).reclaim() is None

    def test_is_given_to_one_of_two_relays(self, connect):
        old, new = BatchFactory.create_batch(2, state=State.RELEASED)
        first, second = connect(), connect()

        with first.transaction():
            one = claims(first, 1).reclaim()
            two = claims(second, 2).reclaim()  # does not wait

        assert (one.id, two.id) == (old.id, new.id)

    @pytest.mark.parametrize("state", [State.RELEASED, State.CLAIMED, State.DEAD])
    def test_waits_for_an_earlier_batch_of_its_keys(self, connect, held, state):
        topic = TopicFactory(type="fifo")
        later_due = datetime.now(UTC) + timedelta(hours=1)
        BatchFactory(topic=topic, order_keys=[1, 2], size=2, state=state, owner=held, due_at=later_due)
        BatchFactory(topic=topic, order_keys=[2], state=State.RELEASED, first_seq=3)
        free = BatchFactory(topic=topic, order_keys=[3], state=State.RELEASED, first_seq=4)

        assert claims(connect(), 2).reclaim().id == free.id

    def test_does_not_wait_for_a_later_batch_of_its_keys(self, connect):
        topic = TopicFactory(type="fifo")
        old = BatchFactory(topic=topic, order_keys=[1], state=State.RELEASED)
        BatchFactory(topic=topic, order_keys=[1], state=State.RELEASED, first_seq=2)

        assert claims(connect()).reclaim().id == old.id

    def test_takes_messages_of_a_key_in_their_order_however_late_they_were_split_off(self, connect):
        topic = TopicFactory(type="fifo")
        third = BatchFactory(topic=topic, order_keys=[1], state=State.RELEASED, first_seq=3)
        second = BatchFactory(topic=topic, order_keys=[1], state=State.RELEASED, first_seq=2)
        mine = claims(connect())

        assert mine.reclaim().id == second.id

        second.refresh_from_db()
        assert second.state == State.CLAIMED
        Batch.objects.filter(id=second.id).update(state=State.SENT)
        assert mine.reclaim().id == third.id
