"""A publisher that is frozen."""

from itertools import count

import pytest

import outbox
from tests.journeys.frozen.messages import FrozenParcel
from tests.journeys.frozen.places import MARKS, PARTS, each_place, publish, relay

pytestmark = MARKS


@pytest.mark.parametrize("part", range(PARTS))
class TestAFrozen:
    def test_publisher_stops_only_publishers_of_its_key(self, actor, part):
        numbers = count()

        def go_on(sent):
            with outbox.atomic():
                outbox.publish(FrozenParcel(parcel="another", number=next(numbers)))
            return relay()

        assert each_place(actor, "publisher", part, lambda: publish(numbers), go_on)

    def test_publisher_stops_those_of_its_key_as_long_as_its_database_allows(self, actor, part):
        numbers = count()

        def go_on(sent):
            with outbox.atomic():
                outbox.publish(FrozenParcel(parcel="frozen", number=next(numbers)))
            return relay()

        assert each_place(actor, "publisher-that-may-not-be-idle", part, lambda: publish(numbers), go_on)
