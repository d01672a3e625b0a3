"""A request that goes half first, or a check loop, that is frozen."""

from contextlib import closing
from itertools import count

import pytest
from django.db import connection

import outbox
from outbox.check_backs.loop import CheckLoop
from tests.journeys.frozen.messages import FrozenPair, note
from tests.journeys.frozen.places import MARKS, PARTS, consume, each_place, publish, relay

pytestmark = MARKS


@pytest.mark.parametrize("part", range(PARTS))
class TestAFrozen:
    def test_request_that_goes_half_first_stops_nobody(self, actor, part):
        numbers = count()

        def prepare():
            with closing(CheckLoop("default", "default")) as loop:
                loop.turn()

        def go_on(_):
            number = next(numbers)
            with outbox.atomic(half_first=FrozenPair(number=number)):
                note(number + 1000)
            prepare()
            relay()
            return number in consume()

        assert each_place(actor, "half-first", part, lambda: None, go_on)

    def test_check_loop_stops_no_other(self, actor, part):
        numbers = count()

        def prepare():
            sent = publish(numbers)
            assert actor.freeze("half-first", 8)
            actor.kill()
            return sent

        def go_on(sent):
            with closing(CheckLoop("default", "default")) as loop:
                loop.turn()
            relay()
            with connection.cursor() as cursor:
                (open_halves,) = cursor.execute("SELECT count(*) FROM outbox_embedded_half WHERE state = 0").fetchone()
            return sent <= consume() and not open_halves

        assert each_place(actor, "checker", part, prepare, go_on)
