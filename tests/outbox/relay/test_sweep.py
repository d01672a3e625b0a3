"""The sweep, and the resend where the broker forgets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from outbox.brokers.base import Ended, EndSemantics, HalfRef, SendResult, SendStatus
from outbox.errors import BrokerUnavailable
from outbox.message import Resolution
from outbox.models import Batch, State
from outbox.relay import sweep as sweep_module
from tests.factories import BatchFactory, TicketFactory, TopicFactory, stored

pytestmark = pytest.mark.django_db

FORGETTING = [EndSemantics.FORGETFUL, EndSemantics.DUPLICATING, EndSemantics.STATELESS]


@pytest.fixture
def prepare(broker, make_topic, make_relay):
    """Have a relay decide a batch whose commits are lost, that long ago."""

    def prepare(size: int = 2, ago: timedelta = timedelta(hours=1)) -> Batch:
        topic = make_topic("transaction")
        TicketFactory.create_batch(size, topic=topic)
        broker.fail("end", SendStatus.UNSURE, times=None)
        make_relay().step()
        broker.heal()
        batch = Batch.objects.get(topic_id=topic.id)
        Batch.objects.filter(pk=batch.id).update(decided_at=datetime.now(UTC) - ago)
        return stored(batch)

    return prepare


def ended(broker) -> list[Ended | None]:
    return [half.ended for half in broker.halves()]


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
        half = HalfRef(broker.halves()[0].message.topic, batch.half_ids[0], str(batch.message_ids[0]))
        broker.end([half], Resolution.COMMIT)  # the check-back was faster

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

    def test_comes_to_the_others_behind_what_stays_stuck(self, relay, broker, prepare, monkeypatch):
        monkeypatch.setattr(sweep_module, "BATCHES_AT_ONCE", 1)
        stuck, other = prepare(1), prepare(1)
        broker.fail("end", SendStatus.UNSURE, times=None, where=lambda half: half.message_id == str(stuck.message_ids[0]))

        relay.sweep()
        relay.sweep()

        assert (stored(stuck).state, stored(other).state) == (State.PREPARED, State.SENT)

    def test_starts_again_behind_the_last(self, relay, broker, prepare, monkeypatch):
        monkeypatch.setattr(sweep_module, "BATCHES_AT_ONCE", 1)
        stuck = prepare(1)
        broker.fail("end", SendStatus.UNSURE)
        relay.sweep()

        relay.sweep()  # nothing stands behind it
        relay.sweep()

        assert stored(stuck).state == State.SENT

    def test_waits_for_a_broker_that_is_out_of_reach(self, relay, broker, prepare):
        batch = prepare(1)
        for _ in range(3):
            relay.breaker.note_unavailable()

        assert relay.sweep().batches == 0
        assert stored(batch).state == State.PREPARED


class TestSweepOfForgottenHalves:
    @pytest.fixture
    def forget(self, broker):
        def forget() -> None:
            broker.end = lambda halves, resolution: [SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND)] * len(halves)

        return forget

    def test_keeps_asking_before_the_horizon(self, relay, broker, prepare, forget):
        batch = prepare(1, ago=timedelta(minutes=5))
        forget()

        assert relay.sweep().returned == 0

        assert stored(batch).state == State.PREPARED

    def test_sends_again_behind_the_horizon_what_is_not_shown(self, relay, broker, prepare, forget):
        batch = prepare(1)
        forget()

        assert relay.sweep().returned == 1

        assert stored(batch).state == State.RELEASED


@pytest.mark.parametrize("end", FORGETTING)
class TestSweepOfOtherEnds:
    @pytest.fixture
    def broker(self, make_broker, end):
        return make_broker(end)

    def test_never_repeats_a_commit(self, relay, broker, prepare):
        prepare(1, ago=timedelta(minutes=5))

        relay.sweep()

        assert ended(broker) == [None]

    def test_marks_behind_the_horizon_what_the_broker_shows(self, relay, broker, prepare):
        batch = prepare(1)
        half = HalfRef(broker.halves()[0].message.topic, batch.half_ids[0], str(batch.message_ids[0]))
        broker.end([half], Resolution.COMMIT)

        assert relay.sweep().sent == 1

        assert broker.copies(str(batch.message_ids[0])) == 1
        assert stored(batch).state == State.SENT

    def test_sends_again_behind_the_horizon_what_it_does_not_show(self, relay, broker, prepare):
        batch = prepare(2)
        half = HalfRef(broker.halves()[0].message.topic, batch.half_ids[0], str(batch.message_ids[0]))
        broker.end([half], Resolution.COMMIT)

        assert relay.sweep().returned == 1
        relay.drain()

        assert [broker.copies(str(message_id)) for message_id in batch.message_ids] == [1, 1]

    def test_leaves_what_cannot_be_looked_up(self, relay, broker, prepare, monkeypatch):
        batch = prepare(1)

        def fail(message_id, *, half=None):
            raise BrokerUnavailable("down")

        monkeypatch.setattr(broker, "find", fail)
        relay.sweep()

        assert stored(batch).state == State.PREPARED
