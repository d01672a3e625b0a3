"""The decision, the commit and the mark; each fence with a batch that another relay has taken over."""

from __future__ import annotations

import logging
from datetime import timedelta

import psycopg
import pytest

from outbox import database, signals
from outbox.brokers.base import Ended, EndSemantics, HalfRef, Outcome, Verdict
from outbox.brokers.memory import MemoryBroker
from outbox.message import Resolution
from outbox.models import Batch, State
from outbox.relay.backoff import Backoff
from outbox.relay.batch import Fared
from outbox.relay.breaker import Breaker
from outbox.relay.commit import Committer
from outbox.relay.part import Parter
from outbox.relay.send import Sender
from tests.factories import BatchFactory, stored
from tests.outbox.relay.batches import claimed, fared, make_claimed

pytestmark = pytest.mark.django_db


@pytest.fixture
def make_committer():
    def make(broker: MemoryBroker, connection: database.Connection | None = None) -> Committer:
        connection = connection or database.raw("default")
        parter = Parter(connection, Backoff(timedelta(0), timedelta(0)), timedelta(0))
        return Committer(connection, broker, parter)

    return make


@pytest.fixture
def committer(make_committer, broker) -> Committer:
    return make_committer(broker)


def send_halves(broker: MemoryBroker, *batches) -> list[Fared]:
    breaker = Breaker(3, Backoff(timedelta(0), timedelta(0)))
    sender = Sender(database.raw("default"), broker, breaker, "urn:uuid:1", 10**6, lambda: False)
    return sender.send(batches, is_half=True, shed_at=float("inf"))


def take_over(batch, **fields) -> None:
    """Do what another relay does that claims a batch again."""
    Batch.objects.filter(pk=batch.id).update(**{"attempt": batch.attempt + 1} | fields)


def ended(broker: MemoryBroker) -> list[Ended | None]:
    return [half.ended for half in broker.halves()]


class TestDecide:
    def test_writes_the_half_ids_and_ends_the_lease(self, committer):
        batch = make_claimed(size=2)

        decision = committer.decide(Fared(batch, {1: "h1", 2: "h2"}))

        row = stored(batch)
        assert (row.state, row.half_ids, row.lease_until, row.open) == (State.PREPARED, ["h1", "h2"], None, None)
        assert row.decided_at is not None
        assert (decision.batch.positions, decision.is_fresh) == ([1, 2], True)

    def test_decides_or_splits_each_position(self, committer):
        batch = make_claimed(size=3)

        decision = committer.decide(fared(batch, accepted={2: "h2"}, refused=1, unsure=3))

        refused, unsure = Batch.objects.exclude(pk=batch.id).order_by("first_seq")
        assert (stored(batch).half_ids, stored(batch).split) == ([None, "h2", None], [1, 3])
        assert (refused.state, unsure.state) == (State.DEAD, State.RELEASED)
        assert decision.batch.positions == [2]

    def test_leaves_a_batch_alone_that_another_relay_claimed_again(self, committer, broker, make_topic):
        batch = make_claimed(topic=make_topic("transaction"), size=2)
        (mine,) = send_halves(broker, batch)
        take_over(batch)

        decision = committer.decide(mine)

        assert decision is None
        assert (stored(batch).state, stored(batch).half_ids) == (State.CLAIMED, None)

    def test_rolls_its_half_messages_back_when_the_fence_is_lost(self, committer, broker, make_topic):
        batch = make_claimed(topic=make_topic("transaction"), size=2)
        (mine,) = send_halves(broker, batch)
        take_over(batch)

        committer.decide(mine)

        assert ended(broker) == [Ended.ROLLED_BACK] * 2

    @pytest.mark.parametrize("state", [State.RELEASED, State.DEAD, State.SKIPPED])
    def test_rolls_back_when_the_batch_was_let_go_meanwhile(self, committer, broker, make_topic, state):
        """A check-back fenced it: it answers ROLLBACK by that very update."""
        batch = make_claimed(topic=make_topic("transaction"))
        (mine,) = send_halves(broker, batch)
        Batch.objects.filter(pk=batch.id).update(state=state)

        assert committer.decide(mine) is None
        assert ended(broker) == [Ended.ROLLED_BACK]

    def test_counts_and_tells_of_a_lost_fence(self, committer, broker, make_topic, caplog):
        batch = make_claimed(topic=make_topic("transaction"))
        (mine,) = send_halves(broker, batch)
        take_over(batch)
        heard = []
        signals.fence_lost.connect(listen := lambda **kwargs: heard.append((kwargs["batch_id"], kwargs["step"])))

        with caplog.at_level(logging.WARNING):
            committer.decide(mine)

        assert listen
        assert committer.fences_lost == 1
        assert heard == [(batch.id, "decide")]
        assert f"batch {batch.id}" in caplog.text

    def test_stands_by_a_decision_whose_answer_was_lost(self, committer, broker, make_topic):
        """F1: the repeated UPDATE matches nothing, and rolling back what it had decided would lose the message."""
        batch = make_claimed(topic=make_topic("transaction"), size=2)
        (mine,) = send_halves(broker, batch)
        committer.decide(mine)

        again = committer.decide(mine)

        assert (again.batch.positions, again.is_fresh) == ([1, 2], False)
        assert ended(broker) == [None, None]
        assert committer.fences_lost == 0

    def test_stands_by_the_positions_that_were_not_split_off_since(self, committer, broker, make_topic):
        batch = make_claimed(topic=make_topic("transaction"), size=2)
        (mine,) = send_halves(broker, batch)
        committer.decide(mine)
        Batch.objects.filter(pk=batch.id).update(split=[1], half_ids=[None, mine.accepted[2]])

        assert committer.decide(mine).batch.positions == [2]

    def test_commits_no_half_message_but_the_one_decided(self, committer, broker, make_topic):
        """Two half messages under one token: the transport repeated the send."""
        batch = make_claimed(topic=make_topic("transaction"))
        (mine,) = send_halves(broker, batch)
        committer.decide(Fared(batch, {1: "the other half"}))

        assert committer.decide(mine) is None

    def test_sends_nothing_when_the_row_is_gone(self, committer, broker, make_topic):
        """A restored database, perhaps: only the check-back may settle that."""
        batch = make_claimed(topic=make_topic("transaction"))
        (mine,) = send_halves(broker, batch)
        Batch.objects.filter(pk=batch.id).delete()

        assert committer.decide(mine) is None
        assert ended(broker) == [None]

    @pytest.mark.django_db(transaction=True)
    def test_sends_nothing_when_the_database_fails(self, make_committer, broker, make_topic, connect):
        batch = make_claimed(topic=make_topic("transaction"))
        (mine,) = send_halves(broker, batch)
        own = connect()
        committer = make_committer(broker, own)
        database.raw("default").execute("SELECT pg_terminate_backend(%s)", [own.info.backend_pid])

        with pytest.raises(psycopg.OperationalError):
            committer.decide(mine)

        assert ended(broker) == [None]
        assert stored(batch).state == State.CLAIMED

    def test_fences_by_the_attempt_when_some_positions_part(self, committer, broker, make_topic):
        batch = make_claimed(topic=make_topic("transaction"), size=2)
        broker.fail("send_halves", Verdict.UNSURE)
        (mine,) = send_halves(broker, batch)
        take_over(batch)

        assert committer.decide(mine) is None
        assert Batch.objects.count() == 1
        assert ended(broker) == [Ended.ROLLED_BACK]


class TestCommitAndConclude:
    def decide(self, committer, broker, make_topic, size=2, **fields):
        (mine,) = send_halves(broker, make_claimed(topic=make_topic("transaction"), size=size, **fields))
        return committer.decide(mine).batch

    def test_marks_a_batch_whose_commits_are_all_answered(self, committer, broker, make_topic):
        batch = self.decide(committer, broker, make_topic)

        sent = committer.conclude(committer.commit([batch]))

        assert sent == {batch.id}
        assert ended(broker) == [Ended.COMMITTED] * 2
        assert stored(batch).state == State.SENT
        assert stored(batch).sent_at is not None

    @pytest.mark.parametrize("verdict", [Verdict.UNAVAILABLE, Verdict.UNSURE])
    def test_leaves_commits_open_that_have_no_answer(self, committer, broker, make_topic, verdict):
        batch = self.decide(committer, broker, make_topic, size=3)
        broker.fail("end", verdict, where=lambda half: half.message_id == batch.message_ids[1])

        assert committer.conclude(committer.commit([batch])) == set()

        assert (stored(batch).state, stored(batch).open) == (State.PREPARED, [2])

    def test_leaves_all_open_when_the_broker_raises(self, committer, broker, make_topic, monkeypatch):
        batch = self.decide(committer, broker, make_topic)

        def fail(*args):
            raise RuntimeError("not foreseen")

        monkeypatch.setattr(broker, "end", fail)
        committer.conclude(committer.commit([batch]))

        assert stored(batch).open == [1, 2]

    def test_leaves_all_open_when_the_outcomes_do_not_fit(self, committer, broker, make_topic, monkeypatch):
        batch = self.decide(committer, broker, make_topic)
        monkeypatch.setattr(broker, "end", lambda *args: [Outcome(Verdict.ACCEPTED, ended=Ended.COMMITTED)])

        committer.conclude(committer.commit([batch]))

        assert stored(batch).open == [1, 2]

    @pytest.mark.parametrize("write", ["mark", "open"])
    def test_leaves_a_batch_alone_that_was_returned_meanwhile(self, committer, broker, make_topic, write):
        batch = self.decide(committer, broker, make_topic, size=1)
        if write == "open":
            broker.fail("end", Verdict.UNSURE)
        take_over(batch, state=State.CLAIMED, half_ids=None)

        assert committer.conclude(committer.commit([batch])) == set()

        assert (stored(batch).state, stored(batch).open) == (State.CLAIMED, None)
        assert committer.fences_lost == 1

    @pytest.mark.parametrize("changes", [{"attempt": 2}, {"state": State.SENT}])
    def test_opens_by_attempt_and_state(self, committer, broker, make_topic, changes):
        batch = self.decide(committer, broker, make_topic)
        broker.fail("end", Verdict.UNSURE, times=2)
        Batch.objects.filter(pk=batch.id).update(**changes)

        committer.conclude(committer.commit([batch]))

        assert stored(batch).open is None

    def test_marks_by_attempt_even_in_the_same_state(self, committer, broker, make_topic):
        batch = self.decide(committer, broker, make_topic, size=1)
        take_over(batch)  # returned, claimed and decided again

        committer.conclude(committer.commit([batch]))

        assert stored(batch).state == State.PREPARED

    def test_agrees_with_a_sweeper_that_was_faster(self, committer, broker, make_topic):
        batch = self.decide(committer, broker, make_topic)
        ends = committer.commit([batch])
        committer.conclude(committer.commit([batch]))

        assert committer.conclude(ends) == {batch.id}
        assert committer.fences_lost == 0


class TestRuleR:
    def discarded(self, committer, broker, make_topic, size, where=lambda message: True):
        (mine,) = send_halves(broker, make_claimed(topic=make_topic("transaction"), size=size))
        batch = committer.decide(mine).batch
        broker.discard_halves(lambda message: where(batch.message_ids.index(message.message_id) + 1))
        return batch

    def test_returns_a_batch_of_one_in_place(self, committer, broker, make_topic):
        batch = self.discarded(committer, broker, make_topic, 1)

        committer.conclude(committer.commit([batch]))

        assert (stored(batch).state, stored(batch).half_ids) == (State.RELEASED, None)
        assert "discarded" in stored(batch).last_error

    def test_splits_off_what_the_broker_has_no_more(self, committer, broker, make_topic):
        batch = self.discarded(committer, broker, make_topic, 3, lambda position: position == 2)

        committer.conclude(committer.commit([batch]))

        row, child = Batch.objects.order_by("id")
        assert (row.state, row.split, row.half_ids[1]) == (State.SENT, [2], None)
        assert (child.state, str(child.message_ids[0])) == (State.RELEASED, batch.message_ids[1])

    def test_keeps_the_rest_open_that_has_no_answer(self, committer, broker, make_topic):
        batch = self.discarded(committer, broker, make_topic, 3, lambda position: position == 2)
        broker.fail("end", Verdict.UNSURE, where=lambda half: half.message_id == batch.message_ids[2])

        committer.conclude(committer.commit([batch]))

        row = stored(batch)
        assert (row.state, row.split, row.open, row.sent_at) == (State.PREPARED, [2], [3], None)

    def test_is_applied_once_by_two_sweepers(self, committer, broker, make_topic):
        batch = self.discarded(committer, broker, make_topic, 2, lambda position: position == 1)
        broker.fail("end", Verdict.UNSURE, times=2, where=lambda half: half.message_id == batch.message_ids[1])
        first, second = committer.commit([batch]), committer.commit([batch])

        committer.conclude(first)
        committer.conclude(second)

        assert Batch.objects.count() == 2

    @pytest.mark.parametrize("end", [EndSemantics.FORGETFUL, EndSemantics.DUPLICATING, EndSemantics.STATELESS])
    def test_is_not_applied_on_the_word_of_a_broker_that_forgets(self, make_committer, make_broker, make_topic, end):
        broker = make_broker(end)
        committer = make_committer(broker)
        batch = self.discarded(committer, broker, make_topic, 1)
        broker.end = lambda halves, resolution: [Outcome(Verdict.ACCEPTED, ended=Ended.ROLLED_BACK)]

        committer.conclude(committer.commit([batch]))

        assert (stored(batch).state, stored(batch).open) == (State.PREPARED, [1])


class TestMark:
    def test_marks_many_batches_at_once(self, committer):
        batches = [make_claimed(), make_claimed()]

        assert committer.mark(batches, state=State.CLAIMED) == {batch.id for batch in batches}

        assert [stored(batch).state for batch in batches] == [State.SENT] * 2
        assert [stored(batch).lease_until for batch in batches] == [None] * 2

    def test_marks_none_that_another_relay_claimed_again(self, committer):
        mine, lost = make_claimed(), make_claimed()
        take_over(lost)

        assert committer.mark([mine, lost], state=State.CLAIMED) == {mine.id}

        assert stored(lost).state == State.CLAIMED
        assert committer.fences_lost == 1

    @pytest.mark.parametrize("state", [State.RELEASED, State.PREPARED, State.DEAD])
    def test_marks_none_in_another_state(self, committer, state):
        batch = claimed(BatchFactory(state=state))

        committer.mark([batch], state=State.CLAIMED)

        assert stored(batch).state == state

    def test_agrees_when_its_answer_was_lost(self, committer):
        batch = make_claimed()
        committer.mark([batch], state=State.CLAIMED)

        assert committer.mark([batch], state=State.CLAIMED) == {batch.id}
        assert committer.fences_lost == 0


class TestLetGo:
    def test_splits_when_something_was_accepted(self, committer):
        batch = make_claimed(size=3)

        committer.let_go(fared(batch, accepted={1: ""}, unavailable=[2, 3]))

        rest = Batch.objects.exclude(pk=batch.id).get()
        assert (stored(batch).state, stored(batch).split) == (State.SENT, [2, 3])
        assert (rest.state, rest.tries, len(rest.message_ids)) == (State.RELEASED, 0, 2)  # one run

    def test_releases_in_place_when_nothing_was(self, committer):
        batch = make_claimed(size=3)

        committer.let_go(fared(batch, unsure=1, unavailable=[2, 3]))

        assert stored(batch).state == State.RELEASED
        assert Batch.objects.count() == 1

    def test_parts_the_dead_from_the_living(self, committer):
        batch = make_claimed(size=3)

        committer.let_go(fared(batch, refused=2, unsure=[1, 3]))

        assert stored(batch).state == State.SENT  # and empty
        assert stored(batch).split == [1, 2, 3]
        states = Batch.objects.exclude(pk=batch.id).order_by("first_seq").values_list("state", flat=True)
        assert list(states) == [State.RELEASED, State.DEAD, State.RELEASED]

    def test_holds_all_later_messages_of_a_key(self, committer, make_topic):
        batch = make_claimed(topic=make_topic("fifo"), size=3, order_keys=[7, 8, 7])

        committer.let_go(fared(batch, accepted={2: ""}, unsure=1, held=3))

        rest = Batch.objects.exclude(pk=batch.id).order_by("id")
        assert [row.first_seq for row in rest] == [1, 3]  # in this order they are claimed again

    def test_leaves_a_batch_alone_that_another_relay_claimed_again(self, committer):
        batch = make_claimed(size=2)
        take_over(batch)

        assert not committer.let_go(fared(batch, unsure=[1, 2]))

        assert stored(batch).state == State.CLAIMED
        assert committer.fences_lost == 1


class TestEnd:
    def test_asks_nobody_for_nothing(self, committer, broker):
        broker.end = None

        assert committer.end([], Resolution.COMMIT) == []

    def test_hands_the_resolution_over(self, committer, broker, make_topic):
        (mine,) = send_halves(broker, make_claimed(topic=make_topic("transaction")))
        half = HalfRef(mine.batch.topic, mine.accepted[1], mine.batch.message_ids[0])

        (outcome,) = committer.end([half], Resolution.ROLLBACK)

        assert outcome.ended is Ended.ROLLED_BACK
