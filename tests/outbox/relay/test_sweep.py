"""The sweep where a second end does no harm, and the resend after discard."""

from datetime import UTC, datetime, timedelta

import pytest

from outbox import database
from outbox.brokers.base import Ended, HalfStatus, SendResult, SendStatus
from outbox.message import Resolution
from outbox.models import Batch, State
from tests.factories import BatchFactory, TopicFactory, stored
from tests.outbox.relay.committing import ended, half_of
from tests.outbox.relay.outages import open_broker

pytestmark = pytest.mark.django_db


class TestSweepOfIdempotentEnds:
    def test_commits_again_what_has_no_answer(self, relay, broker, prepare):
        batch = prepare()

        swept = relay.sweep()

        assert (swept.batches, swept.sent) == (1, 2)
        assert ended(broker) == [Ended.COMMITTED] * 2
        assert stored(batch).state == State.SENT

    def test_commits_all_where_no_commit_was_tried(self, relay, broker, prepare):
        """The relay died between its decision and the commit: `open` is NULL."""
        batch = prepare()
        Batch.objects.filter(pk=batch.id).update(open=None)

        relay.sweep()

        assert ended(broker) == [Ended.COMMITTED] * 2

    def test_commits_only_what_is_open(self, relay, broker, prepare):
        batch = prepare()
        Batch.objects.filter(pk=batch.id).update(open=[2])

        relay.sweep()

        assert ended(broker) == [None, Ended.COMMITTED]

    def test_passes_over_what_was_split_off(self, relay, broker, prepare):
        batch = prepare()
        Batch.objects.filter(pk=batch.id).update(split=[1], half_ids=[None, batch.half_ids[1]], open=None)

        relay.sweep()

        assert ended(broker) == [None, Ended.COMMITTED]

    def test_does_no_harm_to_what_was_committed_meanwhile(self, relay, broker, prepare):
        batch = prepare(1)
        broker.end([half_of(broker, batch)], Resolution.COMMIT)  # the check-back was faster

        relay.sweep()

        assert broker.copies(str(batch.message_ids[0])) == 1
        assert stored(batch).state == State.SENT

    @pytest.mark.parametrize("fields", [{"state": State.CLAIMED}, {"state": State.RELEASED}, {"state": State.DEAD}])
    def test_leaves_what_is_not_decided(self, relay, broker, prepare, fields):
        Batch.objects.filter(pk=prepare().id).update(**fields)

        assert relay.sweep().batches == 0

        assert ended(broker) == [None, None]

    def test_leaves_young_decisions_to_their_relay(self, make_relay, prepare):
        prepare(ago=timedelta(seconds=5))

        assert make_relay(sweep_age=timedelta(seconds=10)).sweep().batches == 0

    def test_leaves_the_batches_of_other_brokers(self, relay, prepare):
        BatchFactory(
            topic=TopicFactory(broker="another"),
            state=State.PREPARED,
            half_ids=["h"],
            decided_at=datetime(2010, 12, 1, tzinfo=UTC),
        )

        assert relay.sweep().batches == 0

    def test_sends_again_what_the_broker_has_discarded(self, relay, broker, prepare):
        batch = prepare(1)
        broker.discard_halves()

        assert relay.sweep().returned == 1
        relay.drain()

        assert broker.copies(str(batch.message_ids[0])) == 1
        assert [half.message.token.split(":")[-2] for half in broker.halves()] == ["1", "2"]  # a new attempt
        assert stored(batch).state == State.SENT

    def test_comes_to_the_others_behind_what_stays_stuck(self, relay, broker, prepare, pages):
        pages(1)
        stuck, other = prepare(1), prepare(1)
        broker.fail("end", SendStatus.UNSURE, times=None, where=lambda half: half.message_id == str(stuck.message_ids[0]))

        relay.sweep()
        relay.sweep()

        assert (stored(stuck).state, stored(other).state) == (State.PREPARED, State.SENT)

    def test_starts_again_behind_the_last(self, relay, broker, prepare, pages):
        pages(1)
        stuck = prepare(1)
        broker.fail("end", SendStatus.UNSURE)
        relay.sweep()

        relay.sweep()  # nothing stands behind it
        relay.sweep()

        assert stored(stuck).state == State.SENT

    def test_looks_at_each_batch_once(self, relay, broker, prepare, pages):
        pages(1, seconds=3600)
        prepare(1), prepare(1)
        broker.fail("end", SendStatus.UNSURE, times=None)

        assert relay.sweep().batches == 2

    def test_writes_nothing_about_a_batch_that_stays_as_it_is(self, relay, broker, prepare):
        batch = prepare()
        broker.fail("end", SendStatus.UNSURE, times=None)
        xmin = "SELECT xmin::text FROM outbox_batch WHERE id = %s"
        before = database.raw("default").execute(xmin, [batch.id]).fetchone()

        relay.sweep()

        assert database.raw("default").execute(xmin, [batch.id]).fetchone() == before

    def test_waits_for_a_broker_that_is_out_of_reach(self, relay, broker, prepare):
        batch = prepare(1)
        open_broker(relay.breakers)

        assert relay.sweep().batches == 0
        assert stored(batch).state == State.PREPARED


class TestSweepOfForgottenHalves:
    """A repeated commit that is answered: there is no such half message."""

    @pytest.fixture(autouse=True)
    def forget(self, broker, monkeypatch):
        def answer(halves, resolution, within=None):
            return [SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND)] * len(halves)

        self.forget = lambda: monkeypatch.setattr(broker, "end", answer)

    @pytest.mark.parametrize(
        ("standing", "count", "state"),
        [(HalfStatus.GONE, "returned", State.RELEASED), (HalfStatus.UNPROVEN, "dead", State.DEAD)],
        ids=["sends again at once what surely never was visible", "gives up what nobody can tell of"],
    )
    def test_ends_what_is_not_visible(self, relay, broker, prepare, standing, count, state):
        batch = prepare(1, ago=timedelta(minutes=1))
        broker.fail("look_up_halves", standing)
        self.forget()

        assert getattr(relay.sweep(), count) == 1

        assert stored(batch).state == state

    def test_marks_what_is_visible(self, relay, broker, prepare):
        batch = prepare(1)
        broker.end([half_of(broker, batch)], Resolution.COMMIT)
        self.forget()

        assert relay.sweep().sent == 1
        assert stored(batch).state == State.SENT

    @pytest.mark.parametrize("standing", [HalfStatus.HIDDEN, HalfStatus.UNKNOWN])
    def test_comes_back_to_what_it_cannot_settle(self, relay, broker, prepare, standing):
        batch = prepare(1)
        broker.fail("look_up_halves", standing)
        self.forget()

        relay.sweep()

        assert stored(batch).state == State.PREPARED

    def test_asks_about_nothing_that_was_answered(self, relay, broker, prepare, monkeypatch):
        prepare(1)
        monkeypatch.setattr(broker, "look_up_halves", None)

        assert relay.sweep().sent == 1
