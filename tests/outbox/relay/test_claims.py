"""Claims, on Django's connection; tests with two relays have two connections."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any

import pytest
from django.db import connection as django_connection

from outbox.batches.claim import CLAIM, Scope
from outbox.models import Batch, Lane, State, Ticket
from outbox.relay import claims as claims_module
from outbox.relay.claims import MANY_TOPICS, FullScanTimer
from tests.factories import MessageRowFactory, TicketFactory, TopicFactory, stored
from tests.outbox.relay.claiming import LEASE, claims, ids


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
        tickets = sorted(TicketFactory.create_batch(3), key=attrgetter("topic_id"))

        batches = claims().claim()

        assert [batch.message_ids for batch in batches] == [ids([ticket]) for ticket in tickets]

    def test_numbers_messages_without_gap(self):
        topic = TopicFactory()
        mine = claims(batch_size=2)
        TicketFactory.create_batch(3, topic=topic)

        found = [*mine.claim(), *mine.claim()]

        assert [(batch.first_seq, len(batch.message_ids)) for batch in found] == [(1, 2), (3, 1)]
        assert Lane.objects.get(topic_id=topic.id).last_seq == 3

    def test_shares_its_messages_out_among_the_topics_that_wait(self):
        for topic in TopicFactory.create_batch(4):
            TicketFactory.create_batch(3, topic=topic)

        batches = claims(batch_size=4).claim()

        assert [len(batch.message_ids) for batch in batches] == [2, 2, 2, 2]

    @pytest.mark.parametrize("ordered", [False, True])
    def test_takes_no_more_than_fits_into_the_buffer_of_a_socket(self, ordered):
        """A relay that freezes before it reads the result must not keep the lock of ordered claims."""
        for topic in TopicFactory.create_batch(2, type="fifo" if ordered else "normal"):
            with django_connection.cursor() as cursor:
                cursor.execute(
                    "INSERT INTO outbox_ticket (message_id, topic_id, order_key) "
                    "SELECT gen_random_uuid(), %s, 4611686018427387904 + n FROM generate_series(1, 2000) n",
                    [topic.id],
                )
        mine = claims(batch_size=2000)

        batches = mine.claim_ordered() if ordered else mine.claim()

        assert [len(batch.message_ids) for batch in batches] == [1000, 1000]

    def test_takes_a_batch_at_most_of_a_topic(self):
        TicketFactory.create_batch(3, topic=TopicFactory())

        assert [len(batch.message_ids) for batch in claims(batch_size=2).claim()] == [2]

    def test_goes_round_the_topics(self, monkeypatch):
        monkeypatch.setattr(claims_module, "TOPICS_PER_CLAIM", 2)
        topics = TopicFactory.create_batch(3)
        for topic in topics:
            TicketFactory.create_batch(4, topic=topic)
        mine = claims(batch_size=1)

        served = [[batch.topic for batch in mine.claim()] for _ in range(3)]

        a, b, c = (topic.name for topic in sorted(topics, key=attrgetter("id")))
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
            arguments = {"topics": [], "scan_from": [], "ordered": False, "after": 0, "topic_limit": 1}
            arguments |= {"limit": 1, "lane": 1, "lease": LEASE, **Scope("default").arguments()}
            cursor.execute("EXPLAIN (ANALYZE, FORMAT JSON) " + CLAIM, arguments)
            plan = cursor.fetchone()[0][0]["Plan"]

        assert 0 < tickets_read(plan) <= 10


@pytest.mark.django_db(transaction=True)
class TestTwoRelays:
    def test_never_claim_the_same_ticket(self, connect):
        topic = TopicFactory()
        tickets = TicketFactory.create_batch(4, topic=topic)
        first, second = connect(), connect()
        second.execute("SET lock_timeout = '10s'")

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
class TestManyTopics:
    """Many topics, of which few have messages repeatedly."""

    @pytest.fixture
    def mine(self, clock):
        mine = claims(clock=clock, topic_count=MANY_TOPICS, batch_size=1)
        TicketFactory.create_batch(9, topic=TopicFactory(name="busy"))
        assert self.topics(mine) == ["busy"]
        mine.full_scans.due_at = clock.now + 1  # a scan of all topics has just been expensive
        return mine

    @staticmethod
    def topics(mine):
        return sorted(batch.topic for batch in mine.claim())

    def test_are_all_looked_at_now_and_then(self, mine, clock):
        TicketFactory(topic=TopicFactory(name="new"))

        before = self.topics(mine)
        clock.now += 1

        assert (before, self.topics(mine)) == (["busy"], ["busy", "new"])

    def test_are_all_looked_at_when_those_that_had_messages_have_none(self, mine):
        TicketFactory(topic=TopicFactory(name="new"))
        Ticket.objects.filter(topic_id=next(iter(mine.busy))).delete()

        assert self.topics(mine) == ["new"]

    def test_are_all_looked_at_in_turn_when_many_have_messages(self, mine, clock, monkeypatch):
        monkeypatch.setattr(claims_module, "TOPICS_PER_CLAIM", 2)
        for name in ("new", "newer"):
            TicketFactory(topic=TopicFactory(name=name))
        clock.now += 1

        assert {*self.topics(mine), *self.topics(mine)} == {"busy", "new", "newer"}

    def test_are_all_looked_at_each_time_where_they_are_few(self, mine):
        mine.topic_count, mine.busy = MANY_TOPICS - 1, frozenset()
        mine.claim()
        TicketFactory(topic=TopicFactory(name="new"))

        assert self.topics(mine) == ["busy", "new"]


@pytest.mark.django_db
class TestScanPositions:
    def test_start_a_claim_at_the_last_position_seen(self, clock):
        mine = claims(clock=clock)
        late, *tickets = TicketFactory.create_batch(3, topic=TopicFactory())
        Ticket.objects.filter(pos=late.pos).delete()
        mine.claim()
        mine.full_scans.due_at = clock.now + 1  # a scan from 0 has just been expensive

        self.commit_late(late)

        assert mine.claim() == []
        assert mine.scan_positions == {tickets[-1].topic_id: tickets[-1].pos}

    def test_find_a_ticket_that_was_committed_late_within_a_second(self, clock):
        mine = claims(clock=clock)
        late, *_ = TicketFactory.create_batch(3, topic=TopicFactory())
        Ticket.objects.filter(pos=late.pos).delete()
        mine.claim()
        mine.full_scans.due_at = clock.now + 1
        self.commit_late(late)

        clock.now += 1

        assert [batch.message_ids for batch in mine.claim()] == [ids([late])]

    @staticmethod
    def commit_late(ticket: Ticket) -> None:
        with django_connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO outbox_ticket (pos, message_id, topic_id) OVERRIDING SYSTEM VALUE VALUES (%s, %s, %s)",
                [ticket.pos, ticket.message_id, ticket.topic_id],
            )


class TestFullScanTimer:
    def test_is_due_a_second_after_a_slow_scan(self, clock):
        timer = FullScanTimer(clock)
        began = clock.now

        clock.now += 60  # it took a minute
        timer.schedule_next(began)

        assert not timer.is_due()
        clock.now += 1
        assert timer.is_due()

    def test_is_due_when_a_scan_has_taken_a_twentieth_of_the_time(self, clock):
        timer = FullScanTimer(clock)
        began = clock.now

        clock.now += 0.01
        timer.schedule_next(began)

        clock.now += 0.18
        assert not timer.is_due()
        clock.now += 0.03
        assert timer.is_due()
