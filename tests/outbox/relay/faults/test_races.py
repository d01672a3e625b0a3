"""Two relays, or a relay and a sweep, with the same batch; and errors of the database."""

import psycopg
import pytest

from outbox.brokers.base import Ended, EndSemantics, SendStatus
from outbox.models import Batch, State
from outbox.relay.lane import take_lane
from outbox.relay.rounds import Relay
from tests.outbox.relay.committing import ended
from tests.outbox.relay.faults.recovery import ask_about_halves, copies, end_leases

pytestmark = pytest.mark.django_db(transaction=True)


class TestZombie:
    """A relay that is paused, loses its batch to another relay, and resumes."""

    @pytest.mark.parametrize("pause", ["relay.before_half", "relay.after_half"])
    def test_commits_nothing_when_its_lease_was_over(self, at, start, broker, wait, pause):
        messages = wait()
        zombie, other = start(), start()

        at(pause, lambda: (end_leases(), other.drain()))
        drained = zombie.drain()

        assert copies(broker, messages) == [1, 1]
        assert (drained.sent, drained.fences_lost) == (0, 1)
        assert sorted(ended(broker)) == [Ended.COMMITTED] * 2 + [Ended.ROLLED_BACK] * 2

    @pytest.mark.parametrize("end", list(EndSemantics))
    def test_rolls_back_its_own_half_messages_only(self, at, connect, make_broker, make_relay, wait, end):
        """Its ROLLBACK arrives after the COMMIT of the attempt that followed."""
        broker = make_broker(end)
        messages = wait()
        zombie, other = (
            Relay(connection, broker, take_lane(connection, lanes=16), settings=None) for connection in (connect(), connect())
        )

        at("relay.after_half", lambda: (end_leases(), other.drain()))
        zombie.drain()

        assert copies(broker, messages) == [1, 1]

    def test_does_not_mark_the_batch_of_another(self, at, start, broker, wait):
        """The other relay has claimed it again and not sent it yet."""
        wait("normal")
        zombie, other = start(), start()

        at("relay.after_send", lambda: (end_leases(), other.claims.reclaim()))
        drained = zombie.drain()

        assert (drained.sent, drained.fences_lost) == (0, 1)
        assert Batch.objects.get().state == State.CLAIMED

    def test_does_not_split_the_batch_of_another(self, at, start, broker, wait):
        wait("normal")
        broker.fail("send", SendStatus.REFUSED)
        zombie, other = start(), start()

        at("relay.after_send", lambda: (end_leases(), other.claims.reclaim()))
        zombie.drain()

        assert Batch.objects.get().state == State.CLAIMED


class TestSweepsAndRelays:
    def test_commit_together_and_show_one(self, at, start, broker, wait):
        messages = wait()
        relay, sweeper = start(), start()

        at("relay.after_decide", sweeper.sweep)
        drained = relay.drain()

        assert copies(broker, messages) == [1, 1]
        assert (drained.sent, drained.fences_lost) == (2, 0)

    def test_write_down_one_commit_together(self, at, start, broker, wait):
        """The relay's commits have no answer, the sweeper's have."""
        messages = wait()
        relay, sweeper = start(), start()
        broker.fail("end", SendStatus.UNSURE, times=2, stored=True)

        at("relay.after_commit", sweeper.sweep)
        relay.drain()

        assert copies(broker, messages) == [1, 1]
        assert Batch.objects.get().state == State.SENT

    def test_return_a_discarded_message_once(self, at, start, broker, wait):
        """Both are told that the broker gave the half up."""
        messages = wait()
        relay, sweeper = start(), start()

        at("relay.after_decide", lambda: broker.discard_halves())
        at("relay.after_commit", sweeper.sweep)
        relay.drain()

        assert copies(broker, messages) == [1, 1]


class TestDatabaseError:
    def test_in_the_decision_sends_nothing_and_is_made_good(self, at, start, broker, wait, connect):
        messages = wait()
        unlucky, holder = start(), connect()
        unlucky.connection.execute("SET lock_timeout = '20ms'")

        with holder.transaction():
            at("relay.after_half", lambda: holder.execute("SELECT FROM outbox_batch FOR UPDATE"))
            with pytest.raises(psycopg.errors.LockNotAvailable):
                unlucky.drain()
            assert ended(broker) == [None, None]
        end_leases()
        start().drain()
        ask_about_halves(broker)

        assert copies(broker, messages) == [1, 1]

    def test_in_some_of_many_marks_leaves_the_others(self, at, start, broker, wait):
        """One batch of two was taken over between send and mark."""
        lost, kept = wait("normal"), wait("normal")
        relay, other = start(), start()

        at("relay.after_send", lambda: (end_leases(), other.claims.reclaim()))
        drained = relay.drain()

        assert (drained.sent, drained.fences_lost) == (2, 1)
        assert copies(broker, lost + kept) == [1] * 4
        assert sorted(Batch.objects.values_list("state", flat=True)) == [State.CLAIMED, State.SENT]
