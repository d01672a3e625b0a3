"""Rows that the splitter writes for messages that were not accepted."""

from datetime import UTC, datetime, timedelta

import pytest

from outbox import signals
from outbox.batches.batch import SplitReason, Unaccepted
from outbox.batches.split import split_at_commit, split_at_decision, split_at_send
from outbox.errors import FenceLost
from outbox.models import Batch, DeadMessage, FailedSend, State
from tests.factories import BatchFactory, TopicFactory, stored
from tests.outbox.relay.batches import children, claimed, decided, make_claimed, result_of

SLOW = timedelta(hours=1)


@pytest.fixture
def heard():
    """The signals sent: (signal, arguments)."""
    found = []
    names = {signals.alert: "alert", signals.message_dead: "message_dead"}

    def listen(signal, sender, **kwargs) -> None:
        found.append((names[signal], kwargs))

    for signal in names:
        signal.connect(listen)
    yield found
    for signal in names:
        signal.disconnect(listen)


def due_in(row: Batch) -> float:
    return (row.due_at - datetime.now(UTC)).total_seconds()


class TestSplit:
    def test_makes_each_run_a_batch_with_its_lane_numbers_and_attempt(self, splitter):
        batch = make_claimed(size=5, lane=3, first_seq=40, attempt=7)

        splitter.split(batch, result_of(batch, unsure=[2, 3], refused=5).unaccepted, split_at_send)

        pair, single = children(batch)
        assert [str(message_id) for message_id in pair.message_ids] == batch.message_ids[1:3]
        assert (pair.lane, pair.first_seq, pair.attempt, pair.state) == (3, 41, 7, State.RELEASED)
        assert (single.lane, single.first_seq, single.attempt, single.state) == (3, 44, 7, State.DEAD)
        assert stored(batch).split == [2, 3, 5]

    def test_leaves_the_rest_sent(self, splitter):
        batch = make_claimed(size=2)

        splitter.split(batch, result_of(batch, unsure=2).unaccepted, split_at_send)

        row = stored(batch)
        assert (row.state, row.lease_until, row.decided_at) == (State.SENT, None, None)
        assert row.sent_at is not None

    def test_leaves_the_rest_decided(self, splitter):
        batch = make_claimed(size=2)

        unaccepted = result_of(batch, unsure=2).unaccepted
        splitter.split(batch, unaccepted, split_at_decision, half_ids=["h1", None], half_places={}, window=None)

        row = stored(batch)
        assert (row.state, row.half_ids, row.open, row.sent_at) == (State.PREPARED, ["h1", None], None, None)
        assert (row.half_places, row.ends_until) == (None, None)
        assert row.decided_at is not None

    def test_writes_places_and_the_end_of_the_window_with_a_decision(self, splitter):
        batch = make_claimed(size=3)

        splitter.split(
            batch,
            result_of(batch, unsure=2).unaccepted,
            split_at_decision,
            half_ids=["h1", None, "h3"],
            half_places={1: "", 3: "a:3"},
            window=timedelta(seconds=2),
        )

        row = stored(batch)
        assert row.half_places == [None, None, "a:3"]
        assert timedelta(seconds=1.9) < row.ends_until - row.decided_at < timedelta(seconds=2.1)

    def test_keeps_places_and_the_end_of_the_window_of_what_was_decided(self, splitter):
        ends_until = datetime(2010, 12, 1, tzinfo=UTC)
        fields = {"half_ids": ["a", "b", "c"], "half_places": ["a:1", "a:2", None], "ends_until": ends_until}
        row = BatchFactory(size=3, state=State.PREPARED, **fields)

        splitter.split(decided(row), {1: Unaccepted(SplitReason.DISCARDED, "gone")}, split_at_commit, open_positions=[3])

        assert (stored(row).half_places, stored(row).ends_until) == ([None, "a:2", None], ends_until)

    def test_gives_up_what_nobody_can_tell_of(self, splitter):
        places = ["a:1", "a:2", "a:3"]
        row = BatchFactory(size=3, state=State.PREPARED, half_ids=["a", "b", "c"], half_places=places)
        gone = {1: DISCARDED, 2: UNPROVEN, 3: UNPROVEN}

        splitter.split(decided(row), gone, split_at_commit, open_positions=[])

        again, dead = children(row)
        assert (again.state, dead.state, dead.last_error) == (State.RELEASED, State.DEAD, "not proved")
        assert stored(row).half_places == ["a:1", "a:2", "a:3"]  # none were given
        assert set(DeadMessage.objects.values_list("message_id", flat=True)) == set(row.message_ids[1:])

    def test_keeps_order_keys_and_their_order(self, splitter):
        batch = make_claimed(topic=TopicFactory(type="fifo"), size=3, order_keys=[7, 8, 7])

        splitter.split(batch, result_of(batch, unsure=1, held=3).unaccepted, split_at_send)

        assert [row.order_keys for row in children(batch)] == [[7], [7]]  # by id, as they are claimed again

    @pytest.mark.parametrize("origin", [None, 7])
    def test_keeps_the_place_of_the_messages_in_the_order_of_their_keys(self, splitter, origin):
        batch = make_claimed(size=3, order_keys=[7, 8, 7], origin_id=origin)

        splitter.split(batch, result_of(batch, refused=2, held=[3]).unaccepted, split_at_send)

        assert [row.origin_id for row in children(batch)] == [origin or batch.id] * 2

    @pytest.mark.parametrize(
        ("fate", "failures", "wait"),
        [("unsure", 3, 400), ("misconfigured", 2, 3600), ("unavailable", 2, 0), ("held", 2, 0), ("shed", 2, 0)],
    )
    def test_counts_failures_and_waits_by_fate(self, splitter, fate, failures, wait):
        batch = make_claimed(size=2, failures=2)

        splitter.split(batch, result_of(batch, **{fate: 2}).unaccepted, split_at_send)

        (child,) = children(batch)
        assert (child.failures, child.state) == (failures, State.RELEASED)
        assert due_in(child) == pytest.approx(wait, abs=2)

    def test_happens_once(self, splitter):
        """A repeated split finds the position split off."""
        row = BatchFactory(size=3, state=State.PREPARED, half_ids=["a", "b", "c"])
        unaccepted = {2: Unaccepted(SplitReason.DISCARDED, "gone")}

        splitter.split(decided(row), unaccepted, split_at_commit, open_positions=[1])
        with pytest.raises(FenceLost):
            splitter.split(decided(row), unaccepted, split_at_commit, open_positions=[1])

        assert len(children(row)) == 1
        assert stored(row).split == [2]

    def test_leaves_a_batch_of_one_whole(self, splitter):
        batch = make_claimed()

        with pytest.raises(FenceLost):
            splitter.split(batch, result_of(batch, unsure=1).unaccepted, split_at_send)

        assert children(batch) == []

    @pytest.mark.parametrize("changes", [{"attempt": 2}, {"state": State.RELEASED}])
    def test_does_nothing_to_a_batch_that_was_lost(self, splitter, changes):
        row = BatchFactory(size=2, **changes)

        with pytest.raises(FenceLost):
            splitter.split(claimed(row, attempt=1), result_of(claimed(row), refused=2).unaccepted, split_at_send)

        assert children(row) == []
        assert not DeadMessage.objects.exists()
        assert not FailedSend.objects.exists()


class TestInPlace:
    def test_releases_a_batch_of_which_nothing_was_accepted(self, splitter):
        batch = make_claimed(size=2, failures=1)

        splitter.return_batch(batch, result_of(batch, unsure=[1, 2]).unaccepted)

        row = stored(batch)
        assert (row.state, row.failures, row.lease_until, row.last_error) == (
            State.RELEASED, 2, None, "unsure, says the broker",
        )  # fmt: skip
        assert due_in(row) == pytest.approx(200, abs=2)

    def test_burns_no_try_in_an_outage(self, splitter):
        batch = make_claimed(size=2, failures=1)

        splitter.return_batch(batch, result_of(batch, unavailable=[1, 2]).unaccepted)

        row = stored(batch)
        assert (row.state, row.failures) == (State.RELEASED, 1)
        assert due_in(row) <= 0

    def test_gives_up_what_the_broker_refused(self, splitter):
        batch = make_claimed()

        splitter.return_batch(batch, result_of(batch, refused=1).unaccepted)

        assert (stored(batch).state, stored(batch).last_error) == (State.DEAD, "refused, says the broker")

    @pytest.mark.parametrize("fate", ["unsure", "misconfigured", "unavailable"])
    def test_never_gives_up_for_another_reason(self, splitter, fate):
        batch = make_claimed(failures=1_000_000)

        splitter.return_batch(batch, result_of(batch, **{fate: 1}).unaccepted)

        assert stored(batch).state == State.RELEASED

    @pytest.mark.parametrize("changes", [{"attempt": 2}, {"state": State.PREPARED}])
    def test_does_nothing_to_a_batch_that_was_lost(self, splitter, changes):
        row = BatchFactory(**changes)

        with pytest.raises(FenceLost):
            splitter.return_batch(claimed(row, attempt=1), result_of(claimed(row), refused=1).unaccepted)

        assert stored(row).state == row.state
        assert not DeadMessage.objects.exists()


DISCARDED = Unaccepted(SplitReason.DISCARDED, "the broker dropped it")
UNPROVEN = Unaccepted(SplitReason.UNPROVEN, "not proved")


class TestReturnPrepared:
    def test_releases_the_batch_for_a_new_half_message(self, splitter):
        fields = {"half_ids": ["h"], "half_places": ["a:1"], "open": [1], "ends_until": datetime.now(UTC)}
        row = BatchFactory(state=State.PREPARED, **fields)

        splitter.return_prepared(decided(row), DISCARDED)

        row = stored(row)
        assert (row.state, row.half_ids, row.half_places, row.open, row.ends_until, row.failures) == (
            State.RELEASED, None, None, None, None, 1,
        )  # fmt: skip
        assert due_in(row) <= 0

    def test_does_not_go_round_and_round(self, splitter):
        row = BatchFactory(state=State.PREPARED, half_ids=["h"], failures=1)

        splitter.return_prepared(decided(row), DISCARDED)

        assert due_in(stored(row)) == pytest.approx(200, abs=2)

    def test_gives_up_what_nobody_can_tell_of(self, splitter, heard):
        row = BatchFactory(topic=TopicFactory(name="parts"), state=State.PREPARED, half_ids=["h"], half_places=["a:1"])

        splitter.return_prepared(decided(row), UNPROVEN)

        dead = DeadMessage.objects.get()
        assert (stored(row).state, stored(row).last_error) == (State.DEAD, "not proved")
        assert (dead.message_id, dead.reason) == (row.message_ids[0], "not proved")
        assert [(name, kwargs["reason"]) for name, kwargs in heard] == [("message_dead", "not proved")]
        assert FailedSend.objects.get().verdict == "unproven"

    @pytest.mark.parametrize("gone", [DISCARDED, UNPROVEN])
    @pytest.mark.parametrize("changes", [{"attempt": 2}, {"state": State.SENT}])
    def test_does_nothing_to_a_batch_that_was_lost(self, splitter, changes, gone):
        row = BatchFactory(**{"state": State.PREPARED, "half_ids": ["h"]} | changes)

        with pytest.raises(FenceLost):
            splitter.return_prepared(decided(row, attempt=1), gone)

        assert stored(row).state == row.state
        assert not DeadMessage.objects.exists()

    @pytest.mark.parametrize("gone", [DISCARDED, UNPROVEN])
    def test_leaves_a_batch_of_several_to_the_split(self, splitter, gone):
        row = BatchFactory(size=2, state=State.PREPARED, half_ids=["a", "b"])

        with pytest.raises(FenceLost):
            splitter.return_prepared(decided(row), gone)


class TestAnnouncements:
    def test_tell_of_each_message_given_up(self, splitter, heard):
        batch = make_claimed(topic=TopicFactory(name="parts"), size=2)

        splitter.split(batch, result_of(batch, refused=2).unaccepted, split_at_send)

        assert heard == [
            ("message_dead", {
                "message_id": batch.message_ids[1], "topic": "parts", "reason": "refused, says the broker",
            })
        ]  # fmt: skip

    def test_log_each_message_given_up_and_why(self, splitter, caplog):
        batch = make_claimed(size=2, topic=TopicFactory(name="parts"))

        splitter.split(batch, result_of(batch, refused=2).unaccepted, split_at_send)

        assert caplog.messages == [
            f"Message {batch.message_ids[1]} on topic 'parts' is dead (see outbox_replay --unsent): refused, says the broker"
        ]
        [record] = caplog.records
        assert (record.outbox_message_id, record.outbox_topic) == (str(batch.message_ids[1]), "parts")

    def test_log_what_only_an_operator_can_correct_and_why(self, splitter, caplog):
        batch = make_claimed(topic=TopicFactory(name="parts"), attempt=7)

        splitter.return_batch(batch, result_of(batch, misconfigured=1).unaccepted)

        assert caplog.messages == [f"Attempt 7 to send batch {batch.id} of topic parts failed: misconfigured, says the broker"]
        [record] = caplog.records
        assert (record.outbox_batch, record.outbox_topic, record.outbox_attempt) == (batch.id, "parts", batch.attempt)
        assert record.outbox_message_ids == batch.message_ids

    def test_alert_when_only_an_operator_can_help(self, splitter, heard):
        batch = make_claimed(topic=TopicFactory(name="parts"))

        splitter.return_batch(batch, result_of(batch, misconfigured=1).unaccepted)

        assert [(name, kwargs["details"]["topic"]) for name, kwargs in heard] == [("alert", "parts")]

    @pytest.mark.parametrize(("failures", "alerts"), [(8, 0), (9, 1), (10, 0), (19, 1)])
    def test_alert_when_a_batch_fails_again_and_again(self, splitter, heard, failures, alerts):
        batch = make_claimed(failures=failures)

        splitter.return_batch(batch, result_of(batch, unsure=1).unaccepted)

        assert len(heard) == alerts
