"""The mark, and batches that are released instead; each fence is tested with a batch that another relay has claimed."""

import pytest

from outbox.models import Batch, State
from tests.factories import BatchFactory, stored
from tests.outbox.relay.batches import claimed, make_claimed, result_of
from tests.outbox.relay.committing import take_over

pytestmark = pytest.mark.django_db


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

        committer.return_unaccepted(result_of(batch, accepted={1: ""}, unavailable=[2, 3]))

        rest = Batch.objects.exclude(pk=batch.id).get()
        assert (stored(batch).state, stored(batch).split) == (State.SENT, [2, 3])
        assert (rest.state, rest.failures, len(rest.message_ids)) == (State.RELEASED, 0, 2)  # one run

    def test_releases_in_place_when_nothing_was(self, committer):
        batch = make_claimed(size=3)

        committer.return_unaccepted(result_of(batch, unsure=1, unavailable=[2, 3]))

        assert stored(batch).state == State.RELEASED
        assert Batch.objects.count() == 1

    def test_parts_the_dead_from_the_living(self, committer):
        batch = make_claimed(size=3)

        committer.return_unaccepted(result_of(batch, refused=2, unsure=[1, 3]))

        assert stored(batch).state == State.SENT  # and empty
        assert stored(batch).split == [1, 2, 3]
        states = Batch.objects.exclude(pk=batch.id).order_by("first_seq").values_list("state", flat=True)
        assert list(states) == [State.RELEASED, State.DEAD, State.RELEASED]

    def test_holds_all_later_messages_of_a_key(self, committer, make_topic):
        batch = make_claimed(topic=make_topic("fifo"), size=3, order_keys=[7, 8, 7])

        committer.return_unaccepted(result_of(batch, accepted={2: ""}, unsure=1, held=3))

        rest = Batch.objects.exclude(pk=batch.id).order_by("id")
        assert [row.first_seq for row in rest] == [1, 3]  # in this order they are claimed again

    def test_leaves_a_batch_alone_that_another_relay_claimed_again(self, committer):
        batch = make_claimed(size=2)
        take_over(batch)

        assert not committer.return_unaccepted(result_of(batch, unsure=[1, 2]))

        assert stored(batch).state == State.CLAIMED
        assert committer.fences_lost == 1
