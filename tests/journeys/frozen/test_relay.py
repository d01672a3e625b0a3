"""A relay or a maintenance that is frozen."""

from itertools import count

import pytest
from django.db import connection

from outbox.database.partitions import create_partitions
from tests.journeys.frozen.places import LAST_DAY, MARKS, PARTS, each_place, publish, relay

pytestmark = MARKS


@pytest.mark.parametrize("part", range(PARTS))
class TestAFrozen:
    def test_relay_stops_no_other_relay(self, actor, part):
        numbers = count()

        places = each_place(actor, "relay", part, lambda: publish(numbers), lambda _: relay())

        assert len(places) > 5

    def test_maintenance_stops_nobody(self, actor, part):
        numbers = count()

        def prepare():
            create_partitions("default")
            with connection.cursor() as cursor:
                (day,) = cursor.execute(LAST_DAY).fetchone()
                cursor.execute(f'DROP TABLE "{day}"')

        def go_on(_):
            publish(numbers)
            return relay()

        assert each_place(actor, "maintenance", part, prepare, go_on)
