"""Commits and their results; each fence is tested with a batch that another relay has claimed."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from outbox.brokers.base import Ended, EndSemantics, HalfRef, SendResult, SendStatus
from outbox.message import Resolution
from outbox.models import Batch, State
from tests.factories import stored
from tests.outbox.relay.batches import make_claimed
from tests.outbox.relay.committing import ended, send_halves, take_over

pytestmark = pytest.mark.django_db


class TestCommitAndConclude:
    def decide(self, committer, broker, make_topic, size=2, **fields):
        (mine,) = send_halves(broker, make_claimed(topic=make_topic("transaction"), size=size, **fields))
        return committer.decide(mine)

    def test_marks_a_batch_whose_commits_are_all_answered(self, committer, broker, make_topic):
        batch = self.decide(committer, broker, make_topic)

        sent = committer.conclude(committer.commit_halves([batch]))

        assert sent == {batch.id}
        assert ended(broker) == [Ended.COMMITTED] * 2
        assert stored(batch).state == State.SENT
        assert stored(batch).sent_at is not None

    def test_names_the_place_where_the_broker_stores_each_half_message(self, committer, broker, make_topic):
        batch = self.decide(committer, broker, make_topic, size=3)
        placed = {(half.id, str(half.place)) for half in broker.halves()}
        broker.fail("end", SendStatus.UNSURE, times=None, where=lambda half: (half.half_id, half.place) not in placed)

        sent = committer.conclude(committer.commit_halves([batch]))

        assert sent == {batch.id}

    @pytest.mark.parametrize("verdict", [SendStatus.UNAVAILABLE, SendStatus.UNSURE])
    def test_leaves_commits_open_that_have_no_answer(self, committer, broker, make_topic, verdict):
        batch = self.decide(committer, broker, make_topic, size=3)
        broker.fail("end", verdict, where=lambda half: half.message_id == batch.message_ids[1])

        assert committer.conclude(committer.commit_halves([batch])) == set()

        assert (stored(batch).state, stored(batch).open) == (State.PREPARED, [2])

    @pytest.mark.parametrize(
        "end",
        [lambda *_, **options: 1 / 0, lambda *_, **options: [SendResult(SendStatus.ACCEPTED, ended=Ended.COMMITTED)]],
        ids=["the broker raises", "one outcome for two"],
    )
    def test_leaves_all_open_when_the_outcomes_are_not_known(self, committer, broker, make_topic, monkeypatch, end):
        batch = self.decide(committer, broker, make_topic)
        monkeypatch.setattr(broker, "end", end)

        ends = committer.commit_halves([batch])

        assert list(ends[0].unanswered) == [1, 2]
        assert committer.conclude(ends) == set()
        assert (stored(batch).state, stored(batch).open) == (State.PREPARED, None)  # NULL: all are open

    @pytest.mark.parametrize("write", ["mark", "open"])
    def test_leaves_a_batch_alone_that_was_returned_meanwhile(self, committer, broker, make_topic, write):
        batch = self.decide(committer, broker, make_topic)
        if write == "open":
            broker.fail("end", SendStatus.UNSURE)
        take_over(batch, state=State.CLAIMED, half_ids=None)

        assert committer.conclude(committer.commit_halves([batch])) == set()

        assert (stored(batch).state, stored(batch).open) == (State.CLAIMED, None)
        assert committer.fences_lost == 1

    @pytest.mark.parametrize("changes", [{"attempt": 2}, {"state": State.SENT}])
    def test_opens_by_attempt_and_state(self, committer, broker, make_topic, changes):
        batch = self.decide(committer, broker, make_topic)
        broker.fail("end", SendStatus.UNSURE, times=1)
        Batch.objects.filter(pk=batch.id).update(**changes)

        committer.conclude(committer.commit_halves([batch]))

        assert stored(batch).open is None

    def test_marks_by_attempt_even_in_the_same_state(self, committer, broker, make_topic):
        batch = self.decide(committer, broker, make_topic, size=1)
        take_over(batch)  # returned, claimed and decided again

        committer.conclude(committer.commit_halves([batch]))

        assert stored(batch).state == State.PREPARED

    def test_agrees_with_a_sweeper_that_was_faster(self, committer, broker, make_topic):
        batch = self.decide(committer, broker, make_topic)
        ends = committer.commit_halves([batch])
        committer.conclude(committer.commit_halves([batch]))

        assert committer.conclude(ends) == {batch.id}
        assert committer.fences_lost == 0


class TestResendAfterDiscard:
    def discarded(self, committer, broker, make_topic, size, where=lambda message: True):
        (mine,) = send_halves(broker, make_claimed(topic=make_topic("transaction"), size=size))
        batch = committer.decide(mine)
        broker.discard_halves(lambda message: where(batch.message_ids.index(message.message_id) + 1))
        return batch

    def test_returns_a_batch_of_one_in_place(self, committer, broker, make_topic):
        batch = self.discarded(committer, broker, make_topic, 1)

        committer.conclude(committer.commit_halves([batch]))

        assert (stored(batch).state, stored(batch).half_ids) == (State.RELEASED, None)
        assert "discarded" in stored(batch).last_error

    def test_splits_off_what_the_broker_has_no_more(self, committer, broker, make_topic):
        batch = self.discarded(committer, broker, make_topic, 3, lambda position: position == 2)

        committer.conclude(committer.commit_halves([batch]))

        row, child = Batch.objects.order_by("id")
        assert (row.state, row.split, row.half_ids[1]) == (State.SENT, [2], None)
        assert row.half_places == ["0", None, "2"]
        assert (child.state, str(child.message_ids[0])) == (State.RELEASED, batch.message_ids[1])

    def test_keeps_the_rest_open_that_has_no_answer(self, committer, broker, make_topic):
        batch = self.discarded(committer, broker, make_topic, 3, lambda position: position == 2)
        broker.fail("end", SendStatus.UNSURE, where=lambda half: half.message_id == batch.message_ids[2])

        committer.conclude(committer.commit_halves([batch]))

        row = stored(batch)
        assert (row.state, row.split, row.open, row.sent_at) == (State.PREPARED, [2], [3], None)

    def test_is_applied_once_by_two_sweepers(self, committer, broker, make_topic):
        batch = self.discarded(committer, broker, make_topic, 2, lambda position: position == 1)
        broker.fail("end", SendStatus.UNSURE, times=2, where=lambda half: half.message_id == batch.message_ids[1])
        first, second = committer.commit_halves([batch]), committer.commit_halves([batch])

        committer.conclude(first)
        committer.conclude(second)

        assert Batch.objects.count() == 2

    def test_is_not_applied_on_the_word_of_a_broker_that_forgets(self, make_committer, make_broker, make_topic):
        broker = make_broker(EndSemantics.STATELESS)
        committer = make_committer(broker)
        (mine,) = send_halves(broker, make_claimed(topic=make_topic("transaction")))
        decision = committer.decide(mine)
        broker.end = lambda halves, resolution, within: [SendResult(SendStatus.ACCEPTED, ended=Ended.ROLLED_BACK)]

        ends = committer.commit([decision], since=committer.clock())
        committer.conclude(ends)

        assert list(ends[0].unanswered) == [1]
        assert stored(decision).state == State.PREPARED


class TestEnd:
    def test_asks_nobody_for_nothing(self, committer, broker):
        broker.end = None

        assert committer.end([], Resolution.COMMIT) == []

    def test_hands_the_resolution_over(self, committer, broker, make_topic):
        (mine,) = send_halves(broker, make_claimed(topic=make_topic("transaction")))
        half = HalfRef(mine.batch.topic, mine.accepted[1], mine.batch.message_ids[0])

        (outcome,) = committer.end([half], Resolution.ROLLBACK)

        assert outcome.ended is Ended.ROLLED_BACK


class TestTheWindow:
    """Where a second end makes a second copy."""

    WINDOW = timedelta(seconds=2)

    @pytest.fixture
    def broker(self, make_broker):
        return make_broker(EndSemantics.STATELESS, window=self.WINDOW)

    @pytest.fixture
    def committer(self, make_committer, broker, clock):
        return make_committer(broker, clock=clock)

    @pytest.fixture
    def decision(self, committer, broker, make_topic):
        (mine,) = send_halves(broker, make_claimed(topic=make_topic("transaction"), size=2))
        return committer.decide(mine)

    def test_gives_the_broker_what_is_left_of_it(self, committer, decision, ends, clock):
        began = clock.now
        clock.now += 0.5

        committer.conclude(committer.commit([decision], since=began))

        assert ends == [(2, timedelta(seconds=1.5))]
        assert stored(decision).state == State.SENT

    def test_sends_no_end_when_it_is_over(self, committer, decision, ends, clock):
        began = clock.now
        clock.now += 2

        assert committer.commit([decision], since=began) == []
        assert ends == []
        assert stored(decision).state == State.PREPARED

    def test_sends_no_end_for_a_decision_found_written(self, committer, decision, ends, clock):
        """The process that wrote it may have committed."""
        found = replace(decision, is_fresh=False)

        assert committer.commit([found], since=clock.now) == []
        assert ends == []

    def test_has_no_end_where_a_second_end_does_no_harm(self, make_committer, make_broker, clock):
        committer = make_committer(make_broker(window=self.WINDOW), clock=clock)

        assert committer.remaining(clock.now - 3600) is None
        assert not committer.is_over(clock.now - 3600)

    def test_leaves_open_what_has_not_left_by_then(self, committer, broker, decision, clock):
        broker.fail("end", SendStatus.UNAVAILABLE, where=lambda half: half.half_id == decision.half_ids[1])

        committer.conclude(committer.commit([decision], since=clock.now))

        assert (stored(decision).state, stored(decision).open) == (State.PREPARED, [2])
