"""The sweep, and the resend where the broker forgets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from django.db.models import F

from outbox import database
from outbox.batches.retry import retry_messages
from outbox.batches.take_over import SETTLE, Limit
from outbox.brokers.base import Ended, EndSemantics, HalfRef, HalfStanding, Outgoing, SendResult, SendStatus
from outbox.errors import BrokerUnavailable
from outbox.message import Header, Resolution
from outbox.models import Batch, DeadMessage, State
from outbox.relay import sweep as sweep_module
from tests.factories import BatchFactory, TicketFactory, TopicFactory, message_id, stored

pytestmark = pytest.mark.django_db

FORGETTING = [EndSemantics.FORGETFUL, EndSemantics.DUPLICATING, EndSemantics.STATELESS]

WINDOW = timedelta(seconds=2)


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
        Batch.objects.filter(pk=batch.id).update(decided_at=F("decided_at") - ago, ends_until=F("ends_until") - ago)
        return stored(batch)

    return prepare


@pytest.fixture
def pages(monkeypatch):
    """Have a sweep take one batch at once, and stop after so many."""

    def pages(batches: int = 1, seconds: float = 0) -> None:
        monkeypatch.setattr(sweep_module, "AT_ONCE", Limit(batches, 2000))
        monkeypatch.setattr(sweep_module, "LOOK_SECONDS", seconds)

    return pages


def half_of(broker, batch: Batch, position: int = 1) -> HalfRef:
    return HalfRef(broker.halves()[0].message.topic, batch.half_ids[position - 1], str(batch.message_ids[position - 1]))


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
        for _ in range(3):
            relay.breaker.note_unavailable()

        assert relay.sweep().batches == 0
        assert stored(batch).state == State.PREPARED


class TestSweepOfForgottenHalves:
    """A repeated commit that is answered: there is no such half message."""

    @pytest.fixture(autouse=True)
    def forget(self, broker, monkeypatch):
        def answer(halves, resolution, within=None):
            return [SendResult(SendStatus.ACCEPTED, ended=Ended.NOT_FOUND)] * len(halves)

        self.forget = lambda: monkeypatch.setattr(broker, "end", answer)

    def test_sends_again_at_once_what_surely_never_was_visible(self, relay, broker, prepare):
        batch = prepare(1, ago=timedelta(minutes=1))
        broker.fail("look_up_halves", HalfStanding.GONE)
        self.forget()

        assert relay.sweep().returned == 1

        assert stored(batch).state == State.RELEASED

    def test_marks_what_is_visible(self, relay, broker, prepare):
        batch = prepare(1)
        broker.end([half_of(broker, batch)], Resolution.COMMIT)
        self.forget()

        assert relay.sweep().sent == 1
        assert stored(batch).state == State.SENT

    @pytest.mark.parametrize("standing", [HalfStanding.HIDDEN, HalfStanding.UNKNOWN])
    def test_comes_back_to_what_it_cannot_settle(self, relay, broker, prepare, standing):
        batch = prepare(1)
        broker.fail("look_up_halves", standing)
        self.forget()

        relay.sweep()

        assert stored(batch).state == State.PREPARED

    def test_gives_up_what_nobody_can_tell_of(self, relay, broker, prepare):
        batch = prepare(1)
        broker.fail("look_up_halves", HalfStanding.UNPROVEN)
        self.forget()

        assert relay.sweep().dead == 1

        assert stored(batch).state == State.DEAD

    def test_asks_about_nothing_that_was_answered(self, relay, broker, prepare, monkeypatch):
        prepare(1)
        monkeypatch.setattr(broker, "look_up_halves", None)

        assert relay.sweep().sent == 1


class TestSweepOfOtherEnds:
    """Where a second COMMIT makes a second copy, or is not told from the first."""

    @pytest.fixture(params=FORGETTING)
    def broker(self, make_broker, request):
        return make_broker(request.param, window=WINDOW)

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
        broker.fail("look_up_halves", HalfStanding.GONE, where=lambda half: half.half_id == batch.half_ids[1])

        assert relay.sweep().returned == 1
        relay.drain()

        assert [broker.copies(str(message_id)) for message_id in batch.message_ids] == [1, 1]

    def test_leaves_open_what_the_broker_cannot_tell(self, relay, broker, prepare):
        batch = prepare(3)
        broker.fail("look_up_halves", HalfStanding.UNKNOWN, where=lambda half: half.half_id == batch.half_ids[1])

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
        """Ends that waited at the port of a frozen broker are performed when it goes on."""
        batch = prepare(1, ago=WINDOW + SETTLE - timedelta(seconds=5))

        assert relay.sweep().batches == 0

        assert ended(broker) == [None]
        assert stored(batch).ends_until == batch.ends_until

    def test_takes_a_batch_over_that_is_decided_without_an_end(self, relay, prepare):
        """Its broker was another one, perhaps."""
        batch = prepare(1, ago=WINDOW + SETTLE + timedelta(seconds=5))
        Batch.objects.update(ends_until=None)

        relay.sweep()

        assert stored(batch).ends_until > datetime.now(UTC)

    def test_names_place_source_and_time(self, relay, broker, prepare, monkeypatch):
        batch = prepare(1)
        asked = []
        monkeypatch.setattr(broker, "look_up_halves", lambda halves: asked.extend(halves) or [HalfStanding.UNKNOWN])

        relay.sweep()

        (source,) = database.raw("default").execute("SELECT id FROM outbox_source").fetchone()
        assert [(half.place, half.source, half.decided_at) for half in asked] == [("0", source, batch.decided_at)]

    def test_gives_the_broker_what_is_left_of_the_window(self, relay, broker, prepare, monkeypatch, clock):
        prepare(1)
        given = []
        look_up, end = broker.look_up_halves, broker.end

        def look_up_slowly(halves):
            clock.now += 0.5
            return look_up(halves)

        def listen(halves, resolution, *, within=None):
            given.append(within)
            return end(halves, resolution, within=within)

        monkeypatch.setattr(broker, "look_up_halves", look_up_slowly)
        monkeypatch.setattr(broker, "end", listen)
        relay.sweep()

        assert given == [timedelta(seconds=1.5)]

    def test_ends_nothing_when_the_look_up_took_the_whole_window(self, relay, broker, prepare, monkeypatch, clock):
        batch = prepare(1)
        look_up = broker.look_up_halves

        def look_up_slowly(halves):
            clock.now += 2
            return look_up(halves)

        calls = []
        monkeypatch.setattr(broker, "look_up_halves", look_up_slowly)
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
        monkeypatch.setattr(broker, "look_up_halves", lambda halves: [HalfStanding.GONE])

        relay.sweep()

        assert stored(batch).state == State.PREPARED
        assert "told of 1 half messages, asked for 3" in caplog.text

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
        broker.fail("look_up_halves", HalfStanding.UNKNOWN, times=None, where=lambda half: half.half_id == stuck.half_ids[0])

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
        broker.fail("look_up_halves", HalfStanding.UNPROVEN, where=lambda half: half.half_id == batch.half_ids[1])
        return batch

    def test_is_dead_and_says_why(self, relay, unproven):
        assert relay.sweep().dead == 1

        dead = DeadMessage.objects.get()
        assert dead.message_id == unproven.message_ids[1]
        assert "nobody can tell whether it was published" in dead.reason
        assert (stored(unproven).state, stored(unproven).split) == (State.SENT, [2])

    def test_is_dead_in_place_in_a_batch_of_one(self, relay, broker, prepare):
        batch = prepare(1)
        broker.fail("look_up_halves", HalfStanding.UNPROVEN)

        relay.sweep()

        assert stored(batch).state == State.DEAD
        assert DeadMessage.objects.get().message_id == batch.message_ids[0]

    def test_is_sent_when_an_operator_retries_it(self, relay, broker, unproven):
        relay.sweep()

        retry_messages(database.raw("default"), [unproven.message_ids[1]])
        relay.drain()

        assert broker.copies(str(unproven.message_ids[1])) == 1

    def test_is_left_when_an_operator_accepts_it_as_published(self, relay, broker, unproven):
        relay.sweep()

        retry_messages(database.raw("default"), [unproven.message_ids[1]], skip=True)
        relay.drain()

        assert broker.copies(str(unproven.message_ids[1])) == 0
        assert Batch.objects.filter(state=State.SKIPPED).count() == 1


LEAVE_OPEN = """
INSERT INTO outbox_batch (topic_id, message_ids, half_ids, state, decided_at, ends_until) VALUES (%s, %s, %s, %s, %s, %s)
"""


class TestAnOutage:
    """What it leaves open, thousands of messages each in its own batch, is settled in a few looks."""

    @pytest.fixture(params=[EndSemantics.IDEMPOTENT, EndSemantics.STATELESS])
    def broker(self, make_broker, request):
        return make_broker(request.param, window=WINDOW)

    @pytest.fixture
    def leave_open(self, broker, make_topic):
        """Leave batches of so many messages PREPARED, their half messages stored."""

        def leave_open(*sizes: int) -> None:
            topic, long_ago = make_topic("transaction"), datetime.now(UTC) - timedelta(hours=1)
            (source,) = database.raw("default").execute("SELECT id FROM outbox_source").fetchone()
            for size in sizes:
                ids: list[UUID] = [message_id() for _ in range(size)]
                headers = {Header.SOURCE: source}
                stored_halves = broker.send_halves([Outgoing(str(one), topic.name, b"{}", headers=headers) for one in ids])
                half_ids = [half.half_id for half in stored_halves]
                rows = [topic.id, ids, half_ids, State.PREPARED, long_ago, long_ago]
                database.raw("default").execute(LEAVE_OPEN, rows)

        return leave_open

    def test_of_3000_batches_of_one_is_settled(self, relay, broker, leave_open, monkeypatch):
        leave_open(*[1] * 3000)
        calls = []
        end = broker.end

        def listen(halves, resolution, *, within=None):
            calls.append(len(halves))
            return end(halves, resolution, within=within)

        monkeypatch.setattr(broker, "end", listen)
        looks = 0
        while relay.sweep().batches:
            looks += 1

        assert looks <= 10
        assert calls == [500] * 6
        assert Batch.objects.filter(state=State.SENT).count() == 3000
        assert set(ended(broker)) == {Ended.COMMITTED}

    def test_of_batches_of_500_is_settled(self, relay, broker, leave_open):
        leave_open(*[500] * 6)

        relay.sweep()

        assert Batch.objects.filter(state=State.SENT).count() == 6
        assert len(broker.visible(broker.halves()[0].message.topic)) == 3000

    def test_is_taken_up_by_so_many_messages_at_once(self, relay, broker, leave_open, monkeypatch):
        monkeypatch.setattr(sweep_module, "AT_ONCE", Limit(500, 5))
        leave_open(4, 3, 1, 9)
        calls = []
        end = broker.end

        def listen(halves, resolution, *, within=None):
            calls.append(len(halves))
            return end(halves, resolution, within=within)

        monkeypatch.setattr(broker, "end", listen)
        relay.sweep()

        assert calls == [7, 10]
