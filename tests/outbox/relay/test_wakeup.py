import time
from datetime import timedelta

import pytest
from psycopg.pq import TransactionStatus

from outbox.database.wakeup import name_topic, wake_relay
from outbox.relay.lane import take_lane
from outbox.relay.wakeup import Waker, forget_dead

pytestmark = pytest.mark.django_db(transaction=True)

SHORT = timedelta(milliseconds=20)
LONG = timedelta(seconds=1)
TOPIC = 17
PUBLISH = f"SELECT pg_notify('outbox', '{name_topic(TOPIC, 'default')}') FROM outbox_wakeup WHERE broker = 'default'"
NOBODY = frozenset()


@pytest.fixture
def connection(connect):
    connection = connect()
    yield connection
    connection.execute("DELETE FROM outbox_wakeup")


def idle(connection):
    return [relay for (relay,) in connection.execute("SELECT relay FROM outbox_wakeup ORDER BY relay").fetchall()]


def make_waker(connect, number=1, longest=LONG, broker="default", **options):
    return Waker(connect(), number, broker, shortest=SHORT, longest=longest, **options)


def let_pass(connection, seconds):
    """Make the announcements of relays older."""
    connection.execute("UPDATE outbox_wakeup SET announced_at = announced_at - make_interval(secs => %s)", [seconds])


class TestWaker:
    def test_is_woken_by_a_publisher_that_commits_after_the_announcement(self, connect, connection):
        waker = make_waker(connect)
        waker.announce()
        connection.execute(PUBLISH)

        assert waker.wait() == {TOPIC}

    def test_is_woken_once_by_all_that_published_while_it_was_busy(self, connect, connection):
        waker = make_waker(connect)
        waker.announce()
        for _ in range(5):
            connection.execute(PUBLISH)
        waker.withdraw()

        assert (waker.wait(), waker.wait()) == ({TOPIC}, NOBODY)

    def test_is_not_woken_when_nobody_publishes(self, connect, connection):
        waker = make_waker(connect)
        waker.announce()

        assert waker.wait() == NOBODY

    def test_is_not_woken_for_another_broker(self, connect, connection):
        waker, other = make_waker(connect, 1), make_waker(connect, 2, broker="other")
        waker.announce()
        other.announce()
        connection.execute(PUBLISH)

        assert (other.wait(), waker.wait()) == (NOBODY, {TOPIC})

    def test_looks_at_all_topics_when_somebody_else_wakes_it(self, connect, connection):
        waker = make_waker(connect, longest=timedelta(minutes=1))
        waker.announce()
        with connection.transaction():
            connection.execute(PUBLISH)
            wake_relay(connection)

        assert waker.wait() == NOBODY

    @pytest.mark.parametrize("payload", ["", "apples", "apples:default", ":"])
    def test_looks_at_all_topics_when_another_program_notifies(self, connect, connection, payload):
        waker = make_waker(connect, longest=timedelta(minutes=1))
        waker.announce()
        connection.execute("SELECT pg_notify('outbox', %s)", [payload])

        assert waker.wait() == NOBODY

    def test_is_not_on_call_beside_another_that_lives(self, connect, connection):
        waker, other = make_waker(connect, 1), make_waker(connect, 2)
        waker.announce()
        let_pass(connection, 2)

        assert not other.announce()

        connection.execute(PUBLISH)
        assert (other.wait(), waker.wait()) == (NOBODY, {TOPIC})

    def test_takes_the_place_of_one_that_announces_itself_no_longer(self, connect, connection):
        frozen, waker = make_waker(connect, 1), make_waker(connect, 2)
        frozen.announce()
        let_pass(connection, 4)

        assert waker.announce()

        assert not frozen.announce()
        connection.execute(PUBLISH)
        assert (frozen.wait(), waker.wait()) == (NOBODY, {TOPIC})

    def test_takes_the_place_of_one_that_comes_and_goes_if_it_stays(self, connect, connection):
        guest, other_guest = (make_waker(connect, number, is_long_running=False) for number in (1, 2))
        lasting = make_waker(connect, 3)
        guest.announce()

        assert not other_guest.announce()
        assert lasting.announce()

        assert not guest.announce()
        connection.execute(PUBLISH)
        assert (guest.wait(), lasting.wait()) == (NOBODY, {TOPIC})

    def test_takes_the_place_of_one_that_is_busy(self, connect, connection):
        busy, waker = make_waker(connect, 1), make_waker(connect, 2)
        busy.announce()
        busy.withdraw()

        assert waker.announce()

    def test_waits_twice_as_long_each_time_up_to_the_longest(self, connect, connection):
        waker = make_waker(connect, longest=timedelta(milliseconds=60))
        waited = []
        for _ in range(3):
            began = time.monotonic()
            waker.wait()
            waited.append(time.monotonic() - began)

        assert [round(seconds, 2) >= least for seconds, least in zip(waited, (0.02, 0.04, 0.06), strict=True)] == [True] * 3
        assert waited[0] < waited[2]

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

    def test_waits_outside_of_a_transaction(self, connect, connection):
        """PostgreSQL keeps all notifications since the oldest transaction of a listener, and in the end refuses commits."""
        own = connect()
        waker = make_waker(lambda: own)
        waker.announce()

        waker.wait(at_most=timedelta(milliseconds=1))

        assert own.info.transaction_status is TransactionStatus.IDLE

    def test_forgets_what_the_last_holder_of_its_lane_announced(self, connect, connection):
        connection.execute("INSERT INTO outbox_wakeup VALUES ('default', 1), ('other', 2)")

        make_waker(connect, 1)

        assert idle(connection) == [2]

    def test_knows_whether_another_relay_of_its_broker_is_on_call(self, connect, connection):
        waker, other, elsewhere = make_waker(connect, 1), make_waker(connect, 2), make_waker(connect, 3, broker="other")
        waker.announce()

        assert (waker.is_another_on_call(), other.is_another_on_call()) == (False, True)
        assert not elsewhere.is_another_on_call()


class TestForgetDead:
    def test_deletes_the_rows_of_relays_whose_lane_is_free(self, connect, connection):
        living = connect()
        lane = take_lane(living, lanes=16)
        connection.execute("INSERT INTO outbox_wakeup VALUES ('default', %s), ('other', 15)", [lane])

        assert forget_dead(connection) == 1

        assert idle(connection) == [lane]
