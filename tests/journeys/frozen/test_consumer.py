"""A consumer that is frozen."""

from itertools import count

import pytest

from tests.journeys.frozen.places import MARKS, PARTS, consume, each_place, publish, relay
from tests.waiting import wait_until

pytestmark = MARKS


@pytest.mark.parametrize("part", range(PARTS))
class TestAFrozen:
    def test_consumer_stops_no_other_consumer(self, actor, part):
        numbers = count()

        def prepare():
            sent = publish(numbers)
            wait_until(relay)
            return sent

        places = each_place(actor, "consumer", part, prepare, lambda sent: sent <= consume())

        assert len(places) > 5
