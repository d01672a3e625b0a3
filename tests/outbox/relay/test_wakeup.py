import time
from datetime import timedelta

import pytest

from outbox.relay.lane import Lane, take_lane
from outbox.relay.wakeup import Waker, forget_dead

pytestmark = pytest.mark.django_db(transaction=True)

SHORT = timedelta(milliseconds=20)
LONG = timedelta(seconds=1)
PUBLISH = "SELECT pg_notify('outbox', '') FROM outbox_idle LIMIT 1"


@pytest.fixture
def connection(connect):
    connection = connect()
    yield connection
    connection.execute("DELETE FROM outbox_idle")


def idle(connection):
    return [relay for (relay,) in connection.execute("SELECT relay FROM outbox_idle ORDER BY relay").fetchall()]


def make_waker(connect, number=1, longest=LONG):
    return Waker(connect(), Lane(number), shortest=SHORT, longest=longest)


class TestWaker:
    def test_is_woken_by_a_publisher_that_commits_after_the_announcement(self, connect, connection):
        waker = make_waker(connect)
        waker.announce()
        connection.execute(PUBLISH)

        assert waker.wait()

    def test_is_woken_once_by_all_that_published_while_it_was_busy(self, connect, connection):
        waker = make_waker(connect)
        waker.announce()
        for _ in range(5):
            connection.execute(PUBLISH)
        waker.withdraw()

        assert (waker.wait(), waker.wait()) == (True, False)

    def test_is_not_woken_when_nobody_publishes(self, connect, connection):
        waker = make_waker(connect)
        waker.announce()

        assert not waker.wait()

    def test_waits_twice_as_long_each_time_up_to_the_longest(self, connect, connection):
        waker = make_waker(connect, longest=timedelta(milliseconds=60))
        waited = []
        for _ in range(3):
            began = time.monotonic()
            waker.wait()
            waited.append(time.monotonic() - began)

        assert [round(seconds, 2) >= least for seconds, least in zip(waited, (0.02, 0.04, 0.06), strict=True)] == [True] * 3
        assert waited[0] < 0.04 < waited[2] < 0.1

    def test_waits_short_again_after_it_was_busy(self, connect, connection):
        waker = make_waker(connect)
        for _ in range(4):
            waker.wait(at_most=timedelta(milliseconds=1))
        waker.withdraw()

        began = time.monotonic()
        waker.wait()

        assert time.monotonic() - began < 0.15

    def test_costs_publishers_nothing_while_it_is_busy(self, connect, connection):
        waker = make_waker(connect)
        waker.announce()
        waker.withdraw()

        assert connection.execute(PUBLISH).fetchall() == []

    def test_forgets_what_the_last_holder_of_its_lane_announced(self, connect, connection):
        connection.execute("INSERT INTO outbox_idle VALUES (1), (2)")

        make_waker(connect, 1)

        assert idle(connection) == [2]

    def test_knows_whether_another_relay_is_idle(self, connect, connection):
        waker, other = make_waker(connect, 1), make_waker(connect, 2)
        waker.announce()
        assert not waker.is_another_idle()

        other.announce()

        assert waker.is_another_idle()


class TestForgetDead:
    def test_deletes_the_rows_of_relays_whose_lane_is_free(self, connect, connection):
        living = connect()
        lane = take_lane(living, lanes=16)
        connection.execute("INSERT INTO outbox_idle VALUES (%s), (15)", [lane.number])

        assert forget_dead(connection) == 1

        assert idle(connection) == [lane.number]
