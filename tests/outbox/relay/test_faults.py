"""
What may go wrong between a claim and its mark, each on connections of its own.

The numbers are those of the protocol's fault points. In each case every message is shown in the end; on a broker whose
ends are idempotent, once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

import psycopg
import pytest

from outbox import database
from outbox.brokers.base import Ended, EndSemantics, Verdict
from outbox.brokers.memory import MemoryBroker
from outbox.check_back.ask import in_process
from outbox.failpoints import FailpointReached
from outbox.models import Batch, State, Ticket
from outbox.relay import run
from outbox.relay.lane import take_lane
from outbox.relay.run import Relay
from tests.factories import MessageRowFactory, TicketFactory
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def at(monkeypatch) -> Callable[[str, Callable[[], object]], None]:
    """Do something at the next pass of a failpoint."""
    plans = defaultdict(list)

    def reach(name: str) -> None:
        if plans[name]:
            plans[name].pop(0)()

    monkeypatch.setattr(run, "failpoint", reach)
    return lambda name, action: plans[name].append(action)


@pytest.fixture
def start(connect, make_relay) -> Callable[..., Relay]:
    """Start a relay on a connection and a lane of its own."""

    def start(**options) -> Relay:
        connection = connect()
        return make_relay(connection, lane=take_lane(connection, lanes=16), **options)

    return start


@pytest.fixture
def crash_at(at, start) -> Callable[[str], None]:
    """Have a relay die at a failpoint, as by SIGKILL: its connection is gone, and its lane free."""

    def crash_at(name: str) -> None:
        def die() -> None:
            raise FailpointReached(name)

        dying = start()
        at(name, die)
        with pytest.raises(FailpointReached):
            dying.drain()
        dying.connection.close()
        wait_until(partial(_is_free, dying.lane.number))

    return crash_at


def _is_free(lane: int) -> bool:
    row = database.raw("default").execute(
        "SELECT FROM pg_locks WHERE locktype = 'advisory' AND classid = 7707 AND objid = %s", [lane]
    )
    return row.fetchone() is None


@pytest.fixture
def wait(make_topic) -> Callable[..., list[str]]:
    """Have messages wait in a topic of their own."""

    def wait(kind: str = "transaction", count: int = 2) -> list[str]:
        return [str(ticket.message_id) for ticket in TicketFactory.create_batch(count, topic=make_topic(kind))]

    return wait


def copies(broker: MemoryBroker, messages: list[str]) -> list[int]:
    return [broker.copies(message) for message in messages]


def ended(broker: MemoryBroker) -> list[Ended | None]:
    return [half.ended for half in broker.halves()]


def end_leases() -> None:
    Batch.objects.filter(state=State.CLAIMED).update(lease_until=datetime.now(UTC) - timedelta(seconds=1))


def ask_about_halves(broker: MemoryBroker) -> None:
    """Have the broker ask about each open half, and end it as the real check-back answers."""
    for half in broker.halves():
        half.due_at = datetime.now(UTC)
    broker.check_halves(in_process("default"))


class TestCrash:
    @pytest.mark.parametrize("kind", ["normal", "transaction", "fifo"])
    def test_after_the_claim_loses_nothing(self, crash_at, start, broker, make_topic, kind):
        """5"""
        topic = make_topic(kind)
        message = MessageRowFactory(topic=topic, key="k")
        TicketFactory(topic=topic, message=message, order_key=1 if kind == "fifo" else None)

        crash_at("relay.after_claim")
        start().drain()

        assert broker.copies(str(message.id)) == 1

    def test_with_the_half_message_stored_leaves_it_to_be_rolled_back(self, crash_at, start, broker, wait):
        """10"""
        messages = wait()

        crash_at("relay.after_half")
        start().drain()
        ask_about_halves(broker)

        assert copies(broker, messages) == [1, 1]
        assert ended(broker) == [Ended.ROLLED_BACK] * 2 + [Ended.COMMITTED] * 2

    def test_after_the_decision_leaves_the_commit_to_the_sweep(self, crash_at, start, broker, wait):
        """13, 16"""
        messages = wait()

        crash_at("relay.after_decide")
        assert start().drain().batches == 0  # what is decided is never claimed again
        start().sweep()

        assert copies(broker, messages) == [1, 1]
        assert len(broker.halves()) == 2

    def test_after_the_decision_leaves_the_commit_to_the_check_back(self, crash_at, broker, wait):
        """16"""
        messages = wait()

        crash_at("relay.after_decide")
        ask_about_halves(broker)

        assert copies(broker, messages) == [1, 1]

    def test_after_the_commit_shows_nothing_twice(self, crash_at, start, broker, wait):
        """20"""
        messages = wait()

        crash_at("relay.after_commit")
        start().sweep()

        assert copies(broker, messages) == [1, 1]
        assert Batch.objects.get().state == State.SENT

    def test_between_send_and_mark_shows_whole_messages_twice(self, crash_at, start, broker, wait):
        """20, one-phase: the only thing to rely on is a broker that drops repeats."""
        messages = wait("normal")

        crash_at("relay.after_send")
        start().drain()

        assert copies(broker, messages) == [2, 2]


class TestLostAnswers:
    def test_of_a_claim_leave_the_batch_to_the_next_relay(self, start, broker, wait):
        """6"""
        messages = wait("normal")
        unlucky = start()
        unlucky._claims.claim()

        unlucky.connection.close()
        wait_until(partial(_is_free, unlucky.lane.number))
        start().drain()

        assert copies(broker, messages) == [1, 1]
        assert not Ticket.objects.exists()

    def test_of_half_messages_that_never_arrived_send_them_again(self, start, broker, wait):
        """7"""
        messages = wait()
        broker.fail("send_halves", Verdict.UNSURE, times=2)

        start().drain()

        assert copies(broker, messages) == [1, 1]
        assert len(broker.halves()) == 2

    def test_of_half_messages_that_did_arrive_send_them_again_under_a_new_token(self, start, broker, wait):
        """8"""
        messages = wait()
        broker.fail("send_halves", Verdict.UNSURE, times=1, stored=True)

        start().drain()
        ask_about_halves(broker)

        assert copies(broker, messages) == [1, 1]
        assert sorted(ended(broker)) == [Ended.COMMITTED, Ended.COMMITTED, Ended.ROLLED_BACK]

    @pytest.mark.parametrize("is_stored", [False, True])
    def test_of_commits_are_asked_for_again(self, start, broker, wait, is_stored):
        """17, 18"""
        messages = wait()
        broker.fail("end", Verdict.UNSURE, times=2, stored=is_stored)
        relay = start()

        relay.drain()
        assert Batch.objects.get().open == [1, 2]
        relay.sweep()

        assert copies(broker, messages) == [1, 1]
        assert Batch.objects.get().state == State.SENT


class TestRepeats:
    def test_of_a_half_message_by_the_transport_show_one(self, start, broker, wait):
        """9: two halves under one token; the row says which one was decided."""
        messages = wait()
        broker.duplicate("send_halves", times=None)

        start().drain()
        assert len(broker.halves()) == 4
        ask_about_halves(broker)

        assert copies(broker, messages) == [1, 1]

    def test_of_a_commit_by_the_transport_show_one(self, start, broker, wait):
        """18"""
        messages = wait()
        broker.duplicate("end", times=None)

        start().drain()

        assert copies(broker, messages) == [1, 1]

    def test_of_a_commit_under_way_since_before_the_first_check_show_one(self, start, broker, wait):
        """19"""
        messages = wait()
        broker.fail("end", Verdict.UNSURE, times=2, late=True)

        start().drain()
        ask_about_halves(broker)
        broker.deliver_late()

        assert copies(broker, messages) == [1, 1]


class TestZombie:
    """A relay that is paused, loses its batch to another, and wakes up."""

    @pytest.mark.parametrize("pause", ["relay.before_half", "relay.after_half"])
    def test_commits_nothing_when_its_lease_was_over(self, at, start, broker, wait, pause):
        """11, 12"""
        messages = wait()
        zombie, other = start(), start()

        at(pause, lambda: (end_leases(), other.drain()))
        drained = zombie.drain()

        assert copies(broker, messages) == [1, 1]
        assert (drained.sent, drained.fences_lost) == (0, 1)
        assert sorted(ended(broker)) == [Ended.COMMITTED] * 2 + [Ended.ROLLED_BACK] * 2

    @pytest.mark.parametrize("end", list(EndSemantics))
    def test_rolls_back_its_own_half_messages_only(self, at, connect, make_broker, make_relay, wait, end):
        """27: its ROLLBACK arrives after the COMMIT of the attempt that followed."""
        broker = make_broker(end)
        messages = wait()
        zombie, other = (
            Relay(connection, broker, take_lane(connection, lanes=16), settings=None) for connection in (connect(), connect())
        )

        at("relay.after_half", lambda: (end_leases(), other.drain()))
        zombie.drain()

        assert copies(broker, messages) == [1, 1]

    def test_does_not_mark_the_batch_of_another(self, at, start, broker, wait):
        """12, one-phase: the other relay has claimed it again and not sent it yet."""
        wait("normal")
        zombie, other = start(), start()

        at("relay.after_send", lambda: (end_leases(), other._claims.reclaim()))
        drained = zombie.drain()

        assert (drained.sent, drained.fences_lost) == (0, 1)
        assert Batch.objects.get().state == State.CLAIMED

    def test_does_not_split_the_batch_of_another(self, at, start, broker, wait):
        """12"""
        wait("normal")
        broker.fail("send", Verdict.REFUSED)
        zombie, other = start(), start()

        at("relay.after_send", lambda: (end_leases(), other._claims.reclaim()))
        zombie.drain()

        assert Batch.objects.get().state == State.CLAIMED


class TestSweepersAndRelays:
    def test_commit_together_and_show_one(self, at, start, broker, wait):
        """28"""
        messages = wait()
        relay, sweeper = start(), start()

        at("relay.after_decide", sweeper.sweep)
        drained = relay.drain()

        assert copies(broker, messages) == [1, 1]
        assert (drained.sent, drained.fences_lost) == (2, 0)

    def test_write_down_one_commit_together(self, at, start, broker, wait):
        """28: the relay's commits have no answer, the sweeper's have."""
        messages = wait()
        relay, sweeper = start(), start()
        broker.fail("end", Verdict.UNSURE, times=2, stored=True)

        at("relay.after_commit", sweeper.sweep)
        relay.drain()

        assert copies(broker, messages) == [1, 1]
        assert Batch.objects.get().state == State.SENT

    def test_return_a_discarded_message_once(self, at, start, broker, wait):
        """23, 28: both are told that the broker gave the half up."""
        messages = wait()
        relay, sweeper = start(), start()

        at("relay.after_decide", lambda: broker.discard_halves())
        at("relay.after_commit", sweeper.sweep)
        relay.drain()

        assert copies(broker, messages) == [1, 1]


class TestDatabaseError:
    def test_in_the_decision_sends_nothing_and_is_made_good(self, at, start, broker, wait, connect):
        """15"""
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
        """14: one batch of two was taken over between send and mark."""
        lost, kept = wait("normal"), wait("normal")
        relay, other = start(), start()

        at("relay.after_send", lambda: (end_leases(), other._claims.reclaim()))
        drained = relay.drain()

        assert (drained.sent, drained.fences_lost) == (2, 1)
        assert copies(broker, lost + kept) == [1] * 4
        assert sorted(Batch.objects.values_list("state", flat=True)) == [State.CLAIMED, State.SENT]


class TestOrder:
    def publish(self, topic, key: str) -> str:
        message = MessageRowFactory(topic=topic, key=key)
        TicketFactory(topic=topic, message=message, order_key=ord(key))
        return str(message.id)

    def shown(self, broker, topic) -> list[str]:
        return [message.message_id for message in broker.visible(topic.name)]

    def test_a_dead_head_holds_its_key_until_a_person_skips_it(self, start, broker, make_topic):
        """32"""
        topic = make_topic("fifo")
        head, second, other = (self.publish(topic, key) for key in "aab")
        broker.fail("send", Verdict.REFUSED, where=lambda message: message.message_id == head)
        relay = start()
        relay.drain()
        later = self.publish(topic, "a")
        relay.drain()
        assert self.shown(broker, topic) == [other]

        Batch.objects.filter(state=State.DEAD).update(state=State.SKIPPED)
        relay.drain()

        assert self.shown(broker, topic) == [other, second, later]

    def test_holds_through_answers_that_are_lost(self, start, broker, make_topic):
        topic = make_topic("fifo")
        messages = [self.publish(topic, "ab"[n % 2]) for n in range(12)]
        broker.fail("send", Verdict.UNSURE, times=5, where=lambda message: message.message_id in messages[::3])

        start(batch_size=5).drain()

        for key in (0, 1):
            assert [one for one in self.shown(broker, topic) if one in messages[key::2]] == messages[key::2]

    def test_holds_when_the_relay_of_the_first_dies(self, crash_at, start, broker, make_topic):
        topic = make_topic("fifo")
        first = self.publish(topic, "a")

        crash_at("relay.after_claim")
        second = self.publish(topic, "a")
        start().drain()

        assert self.shown(broker, topic) == [first, second]
