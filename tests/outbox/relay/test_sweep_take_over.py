"""The sweep where a half message may be ended only once: batches are taken over and looked up first."""

from datetime import UTC, datetime, timedelta

import pytest

from outbox import database
from outbox.batches.operators import replay_messages
from outbox.batches.take_over import LATE_ENDS
from outbox.brokers.base import Ended, EndSemantics, HalfStatus, SendResult, SendStatus
from outbox.errors import BrokerUnavailable
from outbox.message import Resolution
from outbox.models import Batch, DeadMessage, State
from tests.factories import stored
from tests.outbox.relay.committing import ended, half_of

pytestmark = pytest.mark.django_db

WINDOW = timedelta(seconds=2)


class TestSweepOfOtherEnds:
    """Where a second COMMIT makes a second copy, or cannot be told from the first."""

    @pytest.fixture
    def broker(self, make_broker):
        return make_broker(EndSemantics.STATELESS, window=WINDOW)

    def test_commits_what_is_hidden_once(self, relay, broker, prepare):
        batch = prepare()

        swept = relay.sweep()
        relay.sweep()

        assert (swept.batches, swept.sent) == (1, 2)
        assert [broker.copies(str(message_id)) for message_id in batch.message_ids] == [1, 1]
        assert stored(batch).state == State.SENT

    def test_marks_what_is_visible(self, relay, broker, prepare):
        batch = prepare(1)
        broker.end([half_of(broker, batch)], Resolution.COMMIT)

        assert relay.sweep().sent == 1

        assert broker.copies(str(batch.message_ids[0])) == 1
        assert stored(batch).state == State.SENT

    def test_sends_again_what_surely_never_was_visible(self, relay, broker, prepare):
        batch = prepare(2)
        broker.end([half_of(broker, batch)], Resolution.COMMIT)
        broker.fail("look_up_halves", HalfStatus.GONE, where=lambda half: half.half_id == batch.half_ids[1])

        assert relay.sweep().returned == 1
        relay.drain()

        assert [broker.copies(str(message_id)) for message_id in batch.message_ids] == [1, 1]

    def test_leaves_open_what_the_broker_cannot_tell(self, relay, broker, prepare):
        batch = prepare(3)
        broker.fail("look_up_halves", HalfStatus.UNKNOWN, where=lambda half: half.half_id == batch.half_ids[1])

        relay.sweep()

        assert (stored(batch).state, stored(batch).open) == (State.PREPARED, [2])
        assert [broker.copies(str(message_id)) for message_id in batch.message_ids] == [1, 0, 1]

    @pytest.mark.parametrize("verdict", [SendStatus.UNSURE, SendStatus.UNAVAILABLE])
    def test_leaves_open_what_has_no_answer(self, relay, broker, prepare, verdict):
        batch = prepare(1)
        broker.fail("end", verdict, stored=True)

        assert relay.sweep().sent == 0

        assert stored(batch).state == State.PREPARED

    @pytest.mark.parametrize(
        "answer",
        [SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND), SendResult(SendStatus.UNSURE, ended=Ended.COMMITTED)],
        ids=["not found", "unsure"],
    )
    def test_leaves_open_what_is_answered_otherwise(self, relay, broker, prepare, monkeypatch, answer):
        batch = prepare(1)
        monkeypatch.setattr(broker, "end", lambda halves, resolution, within: [answer])

        assert relay.sweep().sent == 0

        assert stored(batch).state == State.PREPARED

    def test_ends_nothing_before_its_deciders_time_is_long_over(self, relay, broker, prepare):
        """A frozen broker performs the ends that waited at its port when it continues."""
        batch = prepare(1, ago=WINDOW + LATE_ENDS - timedelta(seconds=5))

        assert relay.sweep().batches == 0

        assert ended(broker) == [None]
        assert stored(batch).ends_until == batch.ends_until

    def test_takes_a_batch_over_that_is_decided_without_an_end(self, relay, prepare):
        """For example because it was sent to another broker."""
        batch = prepare(1, ago=WINDOW + LATE_ENDS + timedelta(seconds=5))
        Batch.objects.update(ends_until=None)

        relay.sweep()

        assert stored(batch).ends_until > datetime.now(UTC)

    def test_names_place_source_and_time(self, relay, broker, prepare, monkeypatch):
        batch = prepare(1)
        asked = []
        monkeypatch.setattr(broker, "look_up_halves", lambda halves: asked.extend(halves) or [HalfStatus.UNKNOWN])

        relay.sweep()

        (source,) = database.raw("default").execute("SELECT id FROM outbox_source").fetchone()
        assert [(half.place, half.source, half.decided_at) for half in asked] == [("0", source, batch.decided_at)]

    def test_renews_the_window_when_the_look_up_took_long(self, relay, broker, prepare, monkeypatch, clock, ends):
        batch = prepare(1)
        ends.clear()
        look_up = broker.look_up_halves

        def look_up_slowly(halves):
            clock.now += 60
            return look_up(halves)

        monkeypatch.setattr(broker, "look_up_halves", look_up_slowly)
        relay.sweep()

        assert ends == [(1, timedelta(seconds=2))]
        assert stored(batch).state == State.SENT

    def test_ends_nothing_that_another_sweeper_took_over_meanwhile(self, relay, broker, prepare, monkeypatch):
        batch = prepare(1)
        look_up = broker.look_up_halves

        def look_up_while_another_comes(halves):
            database.raw("default").execute("UPDATE outbox_batch SET ends_until = ends_until + interval '1 second'")
            return look_up(halves)

        calls = []
        monkeypatch.setattr(broker, "look_up_halves", look_up_while_another_comes)
        monkeypatch.setattr(broker, "end", lambda *args, **options: calls.append(args))
        relay.sweep()

        assert calls == []
        assert stored(batch).state == State.PREPARED

    def test_leaves_all_open_and_says_so_once_where_the_look_up_raises(self, relay, broker, prepare, monkeypatch, caplog):
        batch = prepare(3)

        def fail(halves):
            raise BrokerUnavailable("down")

        monkeypatch.setattr(broker, "look_up_halves", fail)
        relay.sweep()

        assert (stored(batch).state, stored(batch).open) == (State.PREPARED, None)
        assert ended(broker) == [None] * 3
        assert len([record for record in caplog.records if "look" in record.message]) == 1

    def test_leaves_all_open_where_the_look_up_does_not_fit(self, relay, broker, prepare, monkeypatch, caplog):
        batch = prepare(3)
        monkeypatch.setattr(broker, "look_up_halves", lambda halves: [HalfStatus.GONE])

        relay.sweep()

        assert stored(batch).state == State.PREPARED
        assert "returned 1 statuses for 3 half messages" in caplog.text

    def test_looks_up_what_it_takes_over_in_one_call(self, relay, broker, prepare, monkeypatch):
        prepare(2), prepare(1)
        calls = []
        look_up = broker.look_up_halves
        monkeypatch.setattr(broker, "look_up_halves", lambda halves: calls.append(len(halves)) or look_up(halves))

        relay.sweep()

        assert calls == [3]

    def test_passes_over_what_was_answered_or_split_off(self, relay, broker, prepare):
        batch = prepare(3)
        Batch.objects.filter(pk=batch.id).update(open=[1, 2], split=[1], half_ids=[None, *batch.half_ids[1:]])

        relay.sweep()

        assert ended(broker) == [None, Ended.COMMITTED, None]
        assert stored(batch).state == State.SENT

    def test_comes_to_the_others_behind_what_stays_stuck(self, relay, broker, prepare, pages):
        pages(1)
        stuck, other = prepare(1), prepare(1)
        broker.fail("look_up_halves", HalfStatus.UNKNOWN, times=None, where=lambda half: half.half_id == stuck.half_ids[0])

        relay.sweep()
        relay.sweep()

        assert (stored(stuck).state, stored(other).state) == (State.PREPARED, State.SENT)


class TestWhatNobodyCanTellOf:
    @pytest.fixture
    def broker(self, make_broker):
        return make_broker(EndSemantics.STATELESS, window=WINDOW)

    @pytest.fixture
    def unproven(self, broker, prepare):
        """A batch of three; of its second message nothing is proved."""
        batch = prepare(3)
        broker.fail("look_up_halves", HalfStatus.UNPROVEN, where=lambda half: half.half_id == batch.half_ids[1])
        return batch

    def test_is_dead_and_says_why(self, relay, unproven):
        assert relay.sweep().dead == 1

        dead = DeadMessage.objects.get()
        assert dead.message_id == unproven.message_ids[1]
        assert "whether it was published is unknown" in dead.reason
        assert (stored(unproven).state, stored(unproven).split) == (State.SENT, [2])

    def test_is_dead_in_place_in_a_batch_of_one(self, relay, broker, prepare):
        batch = prepare(1)
        broker.fail("look_up_halves", HalfStatus.UNPROVEN)

        relay.sweep()

        assert stored(batch).state == State.DEAD
        assert DeadMessage.objects.get().message_id == batch.message_ids[0]

    def test_is_sent_when_an_operator_retries_it(self, relay, broker, unproven):
        relay.sweep()

        replay_messages(database.raw("default"), [unproven.message_ids[1]], by="ada")
        relay.drain()

        assert broker.copies(str(unproven.message_ids[1])) == 1

    def test_is_left_when_an_operator_accepts_it_as_published(self, relay, broker, unproven):
        relay.sweep()

        replay_messages(database.raw("default"), [unproven.message_ids[1]], by="ada", discard=True)
        relay.drain()

        assert broker.copies(str(unproven.message_ids[1])) == 0
        assert Batch.objects.filter(state=State.DISCARDED).count() == 1
