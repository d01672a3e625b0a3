"""Lanes; each relay has a connection of its own."""

import pytest

from outbox.database import Connection
from outbox.errors import LaneNotHeld
from outbox.models import State
from outbox.relay.lane import take_lane
from tests.factories import BatchFactory, stored
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def lane_or_none(connection: Connection) -> int | None:
    try:
        return take_lane(connection, lanes=1)
    except LaneNotHeld:
        return None


class TestTakeLane:
    def test_gives_the_lowest_lane_that_nobody_holds(self, connect):
        lanes = [take_lane(connect(), lanes=4) for _ in range(2)]

        assert lanes == [1, 2]

    def test_raises_when_all_are_held(self, connect):
        take_lane(connect(), lanes=1)

        with pytest.raises(LaneNotHeld, match="All 1 lanes"):
            take_lane(connect(), lanes=1)

    def test_gives_the_lane_of_a_relay_that_died(self, connect):
        dead = connect()
        take_lane(dead, lanes=1)

        dead.close()

        successor = connect()
        assert wait_until(lambda: lane_or_none(successor)) == 1  # the server may take a moment to see it

    def test_releases_what_the_last_holder_left(self, connect):
        left = BatchFactory(owner=1, lane=1, attempt=3)

        take_lane(connect(), lanes=4)

        assert (stored(left).state, stored(left).lease_until) == (State.RELEASED, None)
        assert stored(left).due_at is not None
        assert stored(left).attempt == 3

    @pytest.mark.parametrize("state", [State.PREPARED, State.SENT, State.DEAD])
    def test_leaves_what_the_last_holder_had_settled(self, connect, state):
        settled = BatchFactory(owner=1, lane=1, state=state)

        take_lane(connect(), lanes=4)

        assert stored(settled).state == state

    def test_leaves_the_batches_of_other_lanes(self, connect):
        others = BatchFactory(owner=2, lane=2)

        take_lane(connect(), lanes=4)

        assert stored(others).state == State.CLAIMED
