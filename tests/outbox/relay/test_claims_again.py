"""Batches that were released, or whose relay died, are claimed again."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from outbox import database
from outbox.models import Batch, State
from outbox.relay import lane as lanes
from tests.factories import BatchFactory, TopicFactory, stored
from tests.outbox.relay.claiming import claims
from tests.waiting import wait_until

NEXT_CENTURY = 4_200_000_000.0  # seconds since 1970


@pytest.mark.django_db(transaction=True)
class TestReclaim:
    @pytest.fixture
    def held(self, connect: Callable[[], database.Connection]) -> int:
        """A lane that another relay holds."""
        return lanes.take_lane(connect(), lanes=16)

    def test_takes_up_a_batch_that_is_due_with_the_next_attempt(self, connect):
        batch = BatchFactory(state=State.RELEASED, size=2, attempt=4, failures=3, split=[1], lane=9, first_seq=50)

        found = claims(connect(), 2).reclaim()

        assert (found.id, found.attempt, found.failures, found.split) == (batch.id, 5, 3, {1})
        assert (found.lane, found.first_seq) == (9, 50)  # its numbers stay
        assert (stored(batch).state, stored(batch).owner, stored(batch).due_at) == (State.CLAIMED, 2, None)

    def test_takes_the_oldest_first(self, connect):
        old, new = BatchFactory.create_batch(2, state=State.RELEASED)
        connection = connect()
        mine = claims(connection, lanes.take_lane(connection, lanes=16))

        found = [mine.reclaim().id, mine.reclaim().id]

        assert found == [old.id, new.id]
        assert mine.reclaim() is None

    def test_leaves_a_batch_that_is_not_due_yet(self, connect):
        BatchFactory(state=State.RELEASED, due_at=datetime.now(UTC) + timedelta(minutes=1))

        assert claims(connect()).reclaim() is None

    def test_leaves_a_batch_whose_lease_and_owner_live(self, connect, held):
        BatchFactory(owner=held)

        assert claims(connect(), 2).reclaim() is None

    def test_goes_by_the_clock_of_the_database(self, connect, held, monkeypatch):
        BatchFactory(owner=held)
        monkeypatch.setattr("time.time", lambda: NEXT_CENTURY)
        monkeypatch.setattr("time.monotonic", lambda: NEXT_CENTURY)

        assert claims(connect(), 2).reclaim() is None

    def test_takes_a_batch_whose_lease_is_over(self, connect, held):
        batch = BatchFactory(owner=held, lease_until=datetime.now(UTC) - timedelta(seconds=1))

        assert claims(connect(), 2).reclaim().id == batch.id

    def test_takes_a_batch_at_once_whose_relay_died(self, connect):
        dying = connect()
        batch = BatchFactory(owner=lanes.take_lane(dying, lanes=16))
        mine = claims(connect(), 2)
        assert mine.reclaim() is None

        dying.close()

        found = wait_until(mine.reclaim)  # the server may take a moment to see it
        assert (found.id, found.attempt) == (batch.id, 2)

    @pytest.mark.parametrize("state", [State.PREPARED, State.SENT, State.DEAD, State.DISCARDED])
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
        first = BatchFactory(topic=topic, order_keys=[1], size=3, split=[2, 3], state=State.SENT)
        third = BatchFactory(topic=topic, order_keys=[1], state=State.RELEASED, first_seq=3, origin_id=first.id)
        second = BatchFactory(topic=topic, order_keys=[1], state=State.RELEASED, first_seq=2, origin_id=first.id)
        mine = claims(connect())

        assert mine.reclaim().id == second.id

        second.refresh_from_db()
        assert second.state == State.CLAIMED
        Batch.objects.filter(id=second.id).update(state=State.SENT)
        assert mine.reclaim().id == third.id

    @pytest.mark.parametrize("numbers", [(31, 1), (1, 1), (1, 31)])
    def test_takes_messages_of_a_key_that_two_lanes_claimed_in_the_order_of_the_claims(self, connect, numbers):
        topic = TopicFactory(type="fifo")
        first, second = (
            BatchFactory(topic=topic, order_keys=[1], state=State.RELEASED, lane=lane, first_seq=number)
            for lane, number in enumerate(numbers, 1)
        )
        mine = claims(connect())

        assert mine.reclaim().id == first.id
        assert mine.reclaim(but=first.id) is None

        Batch.objects.filter(id=first.id).update(state=State.SENT)
        assert mine.reclaim().id == second.id

    def test_does_not_wait_for_a_dead_message_that_came_later_though_its_number_is_lower(self, connect):
        topic = TopicFactory(type="fifo")
        lost = BatchFactory(topic=topic, order_keys=[1], state=State.RELEASED, lane=1, first_seq=31)
        BatchFactory(topic=topic, order_keys=[1], state=State.DEAD, lane=2, first_seq=1)

        assert claims(connect()).reclaim().id == lost.id
