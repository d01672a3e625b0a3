"""The decision; each fence is tested with a batch that another relay has claimed."""

import logging
from datetime import timedelta

import psycopg
import pytest
from msgspec.structs import replace

from outbox import database, signals
from outbox.batches.batch import BatchSendResult
from outbox.brokers.base import Ended, EndSemantics, SendStatus
from outbox.models import Batch, State
from tests.factories import stored
from tests.outbox.relay.batches import make_claimed, result_of
from tests.outbox.relay.committing import ended, send_halves, take_over

pytestmark = pytest.mark.django_db


class TestDecide:
    def test_writes_the_half_ids_and_ends_the_lease(self, committer):
        batch = make_claimed(size=2)

        decision = committer.decide(BatchSendResult(batch, {1: "h1", 2: "h2"}))

        row = stored(batch)
        assert (row.state, row.half_ids, row.lease_until, row.open) == (State.PREPARED, ["h1", "h2"], None, None)
        assert (row.half_places, row.ends_until) == (None, None)
        assert row.decided_at is not None
        assert (decision.positions, decision.is_fresh) == ([1, 2], True)

    def test_writes_until_when_the_halves_may_be_ended_and_where_they_are(self, make_committer, make_broker):
        committer = make_committer(make_broker(EndSemantics.STATELESS, window=timedelta(seconds=2)))
        batch = make_claimed(size=2)

        decision = committer.decide(BatchSendResult(batch, {1: "h1", 2: "h2"}, half_places={1: "", 2: "a:2"}))

        row = stored(batch)
        assert row.half_places == [None, "a:2"]
        assert timedelta(seconds=1.9) < row.ends_until - row.decided_at < timedelta(seconds=2.1)
        half = decision.half(2)
        assert (half.half_id, half.place, half.source) == ("h2", "a:2", "urn:uuid:1")

    def test_writes_them_where_some_positions_are_split_off_too(self, make_committer, make_broker):
        committer = make_committer(make_broker(EndSemantics.STATELESS, window=timedelta(seconds=2)))
        batch = make_claimed(size=2)
        result = replace(result_of(batch, accepted={2: "h2"}, unsure=1), half_places={2: "a:2"})

        committer.decide(result)

        row = stored(batch)
        assert row.half_places == [None, "a:2"]
        assert timedelta(seconds=1.9) < row.ends_until - row.decided_at < timedelta(seconds=2.1)

    def test_writes_no_end_where_a_second_end_does_no_harm(self, make_committer, make_broker):
        batch = make_claimed()

        make_committer(make_broker(window=timedelta(seconds=2))).decide(BatchSendResult(batch, {1: "h1"}))

        assert stored(batch).ends_until is None

    def test_decides_or_splits_each_position(self, committer):
        batch = make_claimed(size=3)

        decision = committer.decide(result_of(batch, accepted={2: "h2"}, refused=1, unsure=3))

        refused, unsure = Batch.objects.exclude(pk=batch.id).order_by("first_seq")
        assert (stored(batch).half_ids, stored(batch).split) == ([None, "h2", None], [1, 3])
        assert (refused.state, unsure.state) == (State.DEAD, State.RELEASED)
        assert decision.positions == [2]

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

    def test_names_the_place_and_the_source_of_what_it_rolls_back(self, committer, broker, make_topic, monkeypatch):
        batch = make_claimed(topic=make_topic("transaction"))
        (mine,) = send_halves(broker, batch)
        take_over(batch)
        refs = []
        monkeypatch.setattr(type(committer), "end", lambda self, halves, resolution: refs.extend(halves))

        committer.decide(mine)

        assert [(half.place, half.source) for half in refs] == [("0", "urn:uuid:1")]

    @pytest.mark.parametrize("state", [State.RELEASED, State.DEAD, State.DISCARDED])
    def test_rolls_back_when_the_batch_was_released_meanwhile(self, committer, broker, make_topic, state):
        """A check-back has released it, with the update that let it answer ROLLBACK."""
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
        """The repeated UPDATE matches no row; to roll back the half message now would lose the message."""
        batch = make_claimed(topic=make_topic("transaction"), size=2)
        (mine,) = send_halves(broker, batch)
        committer.decide(mine)

        again = committer.decide(mine)

        assert (again.positions, again.is_fresh) == ([1, 2], False)
        assert ended(broker) == [None, None]
        assert committer.fences_lost == 0

    def test_stands_by_the_positions_that_were_not_split_off_since(self, committer, broker, make_topic):
        batch = make_claimed(topic=make_topic("transaction"), size=2)
        (mine,) = send_halves(broker, batch)
        committer.decide(mine)
        Batch.objects.filter(pk=batch.id).update(split=[1], half_ids=[None, mine.accepted[2]])

        assert committer.decide(mine).positions == [2]

    def test_commits_no_half_message_but_the_one_decided(self, committer, broker, make_topic):
        """Two half messages under one token: the transport repeated the send."""
        batch = make_claimed(topic=make_topic("transaction"))
        (mine,) = send_halves(broker, batch)
        committer.decide(BatchSendResult(batch, {1: "the other half"}))

        assert committer.decide(mine) is None

    def test_sends_nothing_when_the_row_is_gone(self, committer, broker, make_topic):
        """For example in a restored database; only the check-back may settle this."""
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
        broker.fail("send_halves", SendStatus.UNSURE)
        (mine,) = send_halves(broker, batch)
        take_over(batch)

        assert committer.decide(mine) is None
        assert Batch.objects.count() == 1
        assert ended(broker) == [Ended.ROLLED_BACK]
